/* Convolutions with zeros around, of which a block makes maps out of pictures, before the chain.

   A picture is held as [y][x][channel] in a border of zeros. The patch that a result is made of is then a few runs of
   memory, and a row of results is a product with a matrix whose rows overlap: nothing is unfolded. Channels are padded
   to whole vectors, but for those of the samples. */

#pragma once

#include "tiles.h"

enum { WIDEST = 5, CHUNK = 320 }; /* kernel; products at a time of each result */

/* one block: a convolution, ReLU, max-pooling in windows two apart, and normalisation or not. Of the samples whose
   pictures and choices are kept, there are as many as will be learned from at once. */
typedef struct {
    int kernel, window, normalised;
    int in, out, depth, in_row, out_row;      /* channels; padded; floats from one pixel to the next */
    int height, width, line;                  /* of a picture; floats from one of its rows to the next */
    int run, parts, part;                     /* floats of `kernel` pixels, padded, and how they lie: see below */
    int places[WIDEST * WIDEST];              /* of all parts of a patch, from its corner */
    int high, wide, across, top, left;        /* of what pooling makes; results in a row; where the first window is */
    int kept, group;                          /* samples; those whose gradients are kept */
    size_t picture, cells;                    /* floats of a picture with its border, and of what is made of it */
    float *weight, *bias, *change, *bias_change, *drift, *bias_drift; /* [out_row][kernel][run] and [out_row] */
    float *turned;                                                    /* the weights again, see `turn` */
    float *pictures, *results, *gradient, *below;
    int32_t *chosen;
    float *pooled, *sums, *margin, *inner; /* for normalisation */
    struct share *by_result, *by_channel; /* lists of gradients, see `sort_out` */
    int32_t *counts;                      /* of channels, of results */
    float *spread;
} block;

static float *picture_of(const block *one, int sample) { return one->pictures + sample % one->kept * one->picture; }

/* without its border */
static size_t border_of(const block *one) { return one->kernel / 2 * (one->line + one->in_row); }
static float *middle_of(const block *one, int sample) { return picture_of(one, sample) + border_of(one); }

/* where a patch lies in a picture: a row of pixels in one part; but where the pixels of a row would all fall into a
   few sets of a cache, they are moved apart by one line of it, and each is a part */
static void place_patches(block *one) {
    int crowded = one->depth % 64 == 0;
    one->in_row = one->depth + (crowded ? 16 : 0);
    one->run = padded(one->kernel * one->in_row), one->line = (one->width + one->kernel - 1) * one->in_row;
    one->picture = (size_t)(one->height + one->kernel - 1) * one->line;
    one->parts = crowded ? one->kernel : 1, one->part = crowded ? one->depth : one->kernel * one->depth;
    for (int k = 0; k < one->kernel * one->parts; k++)
        one->places[k] = k / one->parts * one->line + k % one->parts * one->in_row;
}

/* weights [out][in][kernel][kernel] and biases [out] into a block's form, zero where it is padded; returns what comes
   after */
static const float *read_block(const block *one, const float *w, float *weight, float *bias) {
    int size = one->kernel;
    memset(weight, 0, (size_t)one->out_row * size * one->run * sizeof(float));
    memset(bias, 0, one->out_row * sizeof(float));
    for (int o = 0; o < one->out; o++)
        for (int c = 0; c < one->in; c++)
            for (int y = 0; y < size; y++)
                for (int x = 0; x < size; x++) weight[(o * size + y) * one->run + x * one->in_row + c] = *w++;
    memcpy(bias, w, one->out * sizeof(float));
    return w + one->out;
}

static float *write_block(const block *one, float *w) {
    int size = one->kernel;
    for (int o = 0; o < one->out; o++)
        for (int c = 0; c < one->in; c++)
            for (int y = 0; y < size; y++)
                for (int x = 0; x < size; x++) *w++ = one->weight[(o * size + y) * one->run + x * one->in_row + c];
    memcpy(w, one->bias, one->out * sizeof(float));
    return w + one->out;
}

/* the weights as the forward product wants them: for each tile of channels what it needs, one after the other */
static void turn(const block *one) {
    size_t each = one->kernel * one->run, steps = one->kernel * one->parts * one->part;
    for (int j = 0, wide; j < one->out_row; j += wide) {
        wide = one->out_row - j >= 2 * LANES ? 2 * LANES : LANES;
        for (int k = 0; k < one->kernel * one->parts; k++)
            flip(one->weight + j * each + k / one->parts * one->run + k % one->parts * one->in_row, each, wide,
                 one->part, one->turned + j * steps + k * one->part * wide, wide);
    }
}

/* the middle of planes [channel][height][width] into the middle of a picture */
static void frame(const block *one, const float *planes, int height, int width, float *picture) {
    int border = one->kernel / 2, top = (height - one->height) / 2, left = (width - one->width) / 2;
    for (int c = 0; c < one->in; c++, planes += height * width)
        for (int y = 0; y < one->height; y++) {
            const float *from = planes + (y + top) * width + left;
            float *to = picture + (y + border) * one->line + border * one->in_row + c;
            for (int x = 0; x < one->width; x++) to[x * one->in_row] = from[x];
        }
}

/* rows of results, [rows][across][out_row]; as many parts of the patches at a time as leave the weights they need in
   the innermost cache */
static void convolve(const block *one, const float *picture, int rows, float *results) {
    int row = one->out_row, m = one->across, tiles = (rows * m + ROWS - 1) / ROWS, runs = one->kernel * one->parts;
    int several = CHUNK / one->part > 1 ? CHUNK / one->part : 1;
    for (int j = 0; j < row; j += 2 * LANES) {
        int wide = row - j >= 2 * LANES ? 2 : 1;
        const float *weight = one->turned + (size_t)j * runs * one->part;
        for (int k = 0, count; k < runs; k += count, weight += count * one->part * wide * LANES) {
            count = runs - k < several ? runs - k : several;
            for (int tile = 0, i = 0; tile < tiles; tile++) { /* about equal: small ones are slow */
                int here = (rows * m - i) / (tiles - tile);
                const float *from[ROWS];
                for (int r = 0; r < here; r++) from[r] = picture + (i + r) / m * one->line + (i + r) % m * one->in_row;
                float *to = results + (size_t)i * row + j;
                const float *start = k ? to : one->bias + j;
#define CALL(R)                                                                                                      \
    if (wide == 2)                                                                                                   \
        forward_tile(R, 2, count, one->places + k, from, weight, 16, one->part, start, k ? row : 0, to, row, 0);     \
    else                                                                                                             \
        forward_tile(R, 1, count, one->places + k, from, weight, 8, one->part, start, k ? row : 0, to, row, 0)
                FOR_ROWS(here, CALL)
#undef CALL
                i += here;
            }
        }
    }
}

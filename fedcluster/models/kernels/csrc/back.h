/* The way back through a block. Of every window of results one goes on, so the gradient at a pooled value concerns a
   single patch: the patch times it is added to the gradient of the weights, the weights times it to the gradient of the
   patch. That is a quarter of the products which the gradients at all results would take. */

#pragma once

#include "pool.h"

/* a gradient, and what it is to be multiplied with: the place of a patch, or of the weights of a channel */
typedef struct share {
    float amount;
    int32_t from;
} share;

/* what is needed for the samples of a group */
static float *gradient_of(const block *one, int sample) { return one->gradient + sample % one->group * one->picture; }
static share *by_result_of(const block *one, int sample) {
    return one->by_result + sample % one->group * (one->cells + 1);
}
static share *by_channel_of(const block *one, int sample) {
    return one->by_channel + sample % one->group * (one->cells + one->out_row);
}
static int32_t *counts_of(const block *one, int sample) {
    return one->counts + sample % one->group * (one->out_row + one->height * one->width);
}

/* to[size][wide] += the sum over a list of each amount times what is at its place */
INLINE void list_tile(int size, int wide, const share *list, int count, const float *from, size_t from_line, float *to,
                      size_t to_line) {
    vector sum[WIDEST][3];
#pragma GCC unroll 5
    for (int y = 0; y < size; y++)
#pragma GCC unroll 3
        for (int v = 0; v < wide; v++) sum[y][v] = all(0);
    for (const share *end = list + count; list < end; list++) {
        vector left = all(list->amount);
        const float *right = from + list->from;
#pragma GCC unroll 5
        for (int y = 0; y < size; y++, right += from_line)
#pragma GCC unroll 3
            for (int v = 0; v < wide; v++) sum[y][v] += left * load(right + v * LANES);
    }
#pragma GCC unroll 5
    for (int y = 0; y < size; y++)
#pragma GCC unroll 3
        for (int v = 0; v < wide; v++) {
            float *at = to + y * to_line + v * LANES;
            store(at, load(at) + sum[y][v]);
        }
}

/* change[outs][size][wide] += the sum over a sample's pooled gradients of each times its patch */
INLINE void patch_tile(int size, int outs, int wide, const block *one, const float *picture, const int32_t *chosen,
                       const float *g, float *change) {
    vector sum[4][WIDEST][3];
    size_t line = one->line, row = one->out_row, cells = one->cells;
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 5
        for (int y = 0; y < size; y++)
#pragma GCC unroll 3
            for (int v = 0; v < wide; v++) sum[o][y][v] = all(0);
    for (size_t cell = 0; cell < cells; cell += row)
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            const float *patch = picture + PLACE(chosen[cell + o]);
            vector left = all(g[cell + o]);
#pragma GCC unroll 5
            for (int y = 0; y < size; y++)
#pragma GCC unroll 3
                for (int v = 0; v < wide; v++) sum[o][y][v] += left * load(patch + y * line + v * LANES);
        }
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 5
        for (int y = 0; y < size; y++)
#pragma GCC unroll 3
            for (int v = 0; v < wide; v++) {
                float *at = change + (o * size + y) * one->run + v * LANES;
                store(at, load(at) + sum[o][y][v]);
            }
}

/* Tiles are `size` rows of a patch and so many vectors wide, as the registers have room for. */
#define FOR_TILES(one, CALL)                                                                   \
    for (int part = 0; part < (one)->parts; part++)                                            \
        for (int v = 0, n = padded((one)->part) / LANES, wide; v < n; v += wide) {             \
            int most = (one)->kernel == 3 ? 3 : 2, at = part * (one)->in_row + v * LANES;      \
            wide = n - v < most ? n - v : most;                                                \
            switch ((one)->kernel * 4 + wide) {                                                \
            case 3 * 4 + 3: CALL(3, 3, at); break;                                             \
            case 3 * 4 + 2: CALL(3, 2, at); break;                                             \
            case 3 * 4 + 1: CALL(3, 1, at); break;                                             \
            case 5 * 4 + 2: CALL(5, 2, at); break;                                             \
            default: CALL(5, 1, at);                                                           \
            }                                                                                  \
        }

INLINE void learn_tiles(int size, int wide, const block *one, const float *picture, const int32_t *chosen,
                        const float *g, float *change) {
    int outs = wide == 1 ? (size == 3 ? 4 : 2) : wide == 2 && size == 3 ? 2 : 1;
    for (int o = 0; o < one->out_row; o += outs)
        patch_tile(size, outs, wide, one, picture, chosen + o, g + o, change + (size_t)o * size * one->run);
}

/* the gradient of the weights, out of that of one sample's pooled values */
static void learn(const block *one, int sample, const float *g) {
    const float *picture = picture_of(one, sample);
    const int32_t *chosen = chosen_of(one, sample);
#define CALL(SIZE, WIDE, AT) learn_tiles(SIZE, WIDE, one, picture + AT, chosen, g, one->change + AT)
    FOR_TILES(one, CALL)
#undef CALL
}

static void learn_bias(const block *one, const float *g, size_t cells) {
    for (int j = 0; j < one->out_row; j += LANES) {
        vector sum = all(0);
        for (size_t cell = 0; cell < cells; cell += one->out_row) sum += load(g + cell + j);
        store(one->bias_change + j, load(one->bias_change + j) + sum);
    }
}

/* the gradient of the picture, and in its border what is left over. Of the four results of a cell, each has a list of
   the channels for which it was the largest. */
static void pass_back(const block *one, int sample, const float *g) {
    const int32_t *chosen = chosen_of(one, sample);
    int row = one->out_row, each = one->kernel * one->run;
    float *gradient = gradient_of(one, sample);
    memset(gradient, 0, one->picture * sizeof(float));
    for (int y = 0; y < one->high; y++)
        for (int x = 0; x < one->wide; x++, chosen += row, g += row) {
            uint64_t counts = 0; /* four, of 16 bits */
            for (int o = 0; o < one->out; o++) {
                int k = WHICH(chosen[o]);
                one->by_result[k * row + (counts >> 16 * k & 0xffff)] = (share){g[o], o * each};
                counts += (uint64_t)(g[o] != 0) << 16 * k;
            }
            for (int k = 0; k < 4; k++) {
                float *patch = gradient + (2 * y + k / 2) * one->line + (2 * x + k % 2) * one->in_row;
#define CALL(SIZE, WIDE, AT)                                                                                         \
    list_tile(SIZE, WIDE, one->by_result + k * row, counts >> 16 * k & 0xffff, one->weight + AT, one->run,           \
              patch + AT, one->line)
                FOR_TILES(one, CALL)
#undef CALL
            }
        }
}

/* Where windows overlap, several may have chosen the same result: their gradients are added up first. Then every result
   has a list of channels, and every channel one of results. */
static void sort_out(const block *one, int sample, const float *g) {
    const int32_t *chosen = chosen_of(one, sample);
    int row = one->out_row, out = one->out, each = one->kernel * one->run, most = one->high * one->wide + 1, steps[9];
    for (int k = 0; k < 9; k++) steps[k] = (k / 3 * one->width + k % 3) * row;
    for (int y = 0; y < one->high; y++)
        for (int x = 0; x < one->wide; x++, chosen += row, g += row) {
            float *corner = one->spread + ((2 * y - one->top) * one->width + 2 * x - one->left) * row;
            for (int o = 0; o < out; o++) corner[steps[WHICH(chosen[o])] + o] += g[o];
        }
    const float *from = one->spread;
    share *list = by_result_of(one, sample), *lists = by_channel_of(one, sample);
    int32_t *filled = counts_of(one, sample), *count = filled + row;
    memset(filled, 0, row * sizeof(int32_t));
    for (int y = 0; y < one->height; y++)
        for (int x = 0; x < one->width; x++, from += row) {
            int place = y * one->line + x * one->in_row;
            share *begin = list;
            for (int o = 0; o < out; o++) {
                share entry = {from[o], o * each}, other = {from[o], place};
                int counts = from[o] != 0, at = o * most + filled[o];
                *list = entry, list += counts;
                lists[at] = other, filled[o] += counts;
            }
            *count++ = list - begin;
        }
    memset(one->spread, 0, (size_t)one->height * one->width * row * sizeof(float));
}

/* The same two for windows that overlap. A tile goes through all lists of a few samples, so that what it needs of the
   weights, or of the picture, stays in the innermost cache, and the rest is called for less often. */
INLINE void channel_tiles(int size, int wide, const block *one, int sample, int at) {
    const share *list = by_channel_of(one, sample);
    const int32_t *count = counts_of(one, sample);
    const float *picture = picture_of(one, sample) + at;
    float *change = one->change + at;
    for (int o = 0; o < one->out; o++, list += one->high * one->wide + 1, change += size * one->run)
        list_tile(size, wide, list, count[o], picture, one->line, change, one->run);
}

static void learn_by_channel(const block *one, int first, int end) {
#define CALL(SIZE, WIDE, AT) \
    for (int i = first; i < end; i++) channel_tiles(SIZE, WIDE, one, i, AT)
    FOR_TILES(one, CALL)
#undef CALL
}

INLINE void result_tiles(int size, int wide, const block *one, int sample, int at) {
    const share *list = by_result_of(one, sample);
    const int32_t *count = counts_of(one, sample) + one->out_row;
    float *gradient = gradient_of(one, sample) + at;
    for (int y = 0; y < one->height; y++)
        for (int x = 0; x < one->width; x++, list += *count++)
            list_tile(size, wide, list, *count, one->weight + at, one->run,
                      gradient + y * one->line + x * one->in_row, one->line);
}

static void pass_back_by_result(const block *one, int first, int end) {
    for (int i = first; i < end; i++) memset(gradient_of(one, i), 0, one->picture * sizeof(float));
#define CALL(SIZE, WIDE, AT) \
    for (int i = first; i < end; i++) result_tiles(SIZE, WIDE, one, i, AT)
    FOR_TILES(one, CALL)
#undef CALL
}

/* weights += what a batch has found, and what is added in every step */
static void step_block(const block *one) {
    int n = one->out_row * one->kernel * one->run;
    for (int i = 0; i < n; i++) one->weight[i] += one->drift ? one->change[i] + one->drift[i] : one->change[i];
    for (int i = 0; i < one->out_row; i++)
        one->bias[i] += one->drift ? one->bias_change[i] + one->bias_drift[i] : one->bias_change[i];
}

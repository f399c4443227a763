/* Blocks of a 3x3 convolution with zeros around, ReLU and 2x2 max-pooling, before the chain.

   A picture is held as [y][x][channel] in a border of zeros. The patch that a result is made of is then three runs of
   memory, and a row of results is a product with a matrix whose rows overlap: nothing is unfolded. Channels are padded
   to whole vectors, but for those of the samples. ReLU is taken after pooling, which is the same function.

   Of every four results one goes on. Backward, the gradient at a pooled value therefore concerns a single patch: the
   patch times it is added to the gradient of the weights, the weights times it to the gradient of the patch. That is a
   quarter of the products which the gradients at all results would take. */

#include "tiles.h"

/* the patch of the largest of four results: its place in the picture, and which of the four it is */
#define CHOICE(place, which) ((place) * 4 + (which))
#define PLACE(choice) ((choice) >> 2)
#define WHICH(choice) ((choice) & 3)

/* one block; of the samples whose pictures and choices are kept, there are as many as will be learned from at once */
typedef struct {
    int in, out, in_row, out_row, run; /* channels; floats of three pixels, padded */
    int height, width, line;           /* of a picture; floats from one of its rows to the next */
    int high, wide, kept;              /* of what pooling makes of it, an odd row or column left out */
    size_t picture, cells;             /* floats of a picture with its border, and of what is made of it */
    float *weight, *bias, *change, *bias_change, *drift, *bias_drift; /* [out_row][3][run] and [out_row] */
    float *turned;                                                    /* weights as [3][3 pixels][out_row] */
    float *pictures, *results, *gradient, *below, *amounts;
    int32_t *chosen, *origins;
} block;

static float *picture_of(const block *one, int sample) { return one->pictures + sample % one->kept * one->picture; }
static int32_t *chosen_of(const block *one, int sample) { return one->chosen + sample % one->kept * one->cells; }

/* weights [out][in][3][3] and biases [out] into a block's form, zero where it is padded; returns what comes after */
static const float *read_block(const block *one, const float *w, float *weight, float *bias) {
    memset(weight, 0, (size_t)one->out_row * 3 * one->run * sizeof(float));
    memset(bias, 0, one->out_row * sizeof(float));
    for (int o = 0; o < one->out; o++)
        for (int c = 0; c < one->in; c++)
            for (int y = 0; y < 3; y++)
                for (int x = 0; x < 3; x++) weight[(o * 3 + y) * one->run + x * one->in_row + c] = *w++;
    memcpy(bias, w, one->out * sizeof(float));
    return w + one->out;
}

static float *write_block(const block *one, float *w) {
    for (int o = 0; o < one->out; o++)
        for (int c = 0; c < one->in; c++)
            for (int y = 0; y < 3; y++)
                for (int x = 0; x < 3; x++) *w++ = one->weight[(o * 3 + y) * one->run + x * one->in_row + c];
    memcpy(w, one->bias, one->out * sizeof(float));
    return w + one->out;
}

/* the weights as the forward product wants them */
static void turn(const block *one) {
    int n = 3 * one->in_row;
    for (int y = 0; y < 3; y++)
        flip(one->weight + y * one->run, 3 * one->run, one->out_row, n, one->turned + (size_t)y * n * one->out_row,
             one->out_row);
}

/* planes [channel][y][x] into the middle of a picture */
static void frame(const block *one, const float *planes, float *picture) {
    for (int c = 0; c < one->in; c++)
        for (int y = 0; y < one->height; y++, planes += one->width) {
            float *to = picture + (y + 1) * one->line + one->in_row + c;
            for (int x = 0; x < one->width; x++) to[x * one->in_row] = planes[x];
        }
}

/* two rows of results, [2][2 wide][out_row], as far as pooling takes them */
static void convolve(const block *one, const float *picture) {
    int line = one->line, row = one->out_row, m = 2 * one->wide, tiles = (2 * m + ROWS - 1) / ROWS;
    for (int j = 0; j < row; j += 2 * LANES) {
        int wide = row - j >= 2 * LANES ? 2 : 1;
        for (int tile = 0, i = 0; tile < tiles; tile++) { /* about equal: small ones are slow */
            int rows = (2 * m - i) / (tiles - tile);
            const float *from[ROWS];
            for (int r = 0; r < rows; r++) from[r] = picture + (i + r) / m * line + (i + r) % m * one->in_row;
            float *to = one->results + i * row + j;
#define CALL(R)                                                                                                      \
    if (wide == 2)                                                                                                   \
        forward_tile(R, 2, 3, line, from, one->turned + j, row, 3 * one->in_row, one->bias + j, to, row, 0);         \
    else                                                                                                             \
        forward_tile(R, 1, 3, line, from, one->turned + j, row, 3 * one->in_row, one->bias + j, to, row, 0)
            FOR_ROWS(rows, CALL)
#undef CALL
            i += rows;
        }
    }
}

/* one sample through the block; rows of what it makes are to_line apart */
static void pass(const block *one, int sample, float *to, int to_line) {
    const float *picture = picture_of(one, sample);
    int32_t *chosen = chosen_of(one, sample);
    int row = one->out_row, beside = 2 * one->wide * row;
    for (int y = 0; y < one->high; y++, to += to_line) {
        convolve(one, picture + 2 * y * one->line);
        for (int x = 0; x < one->wide; x++)
            for (int j = 0; j < row; j += LANES, chosen += LANES) {
                const float *four = one->results + 2 * x * row + j;
                vector best = load(four);
                int corner = 2 * y * one->line + 2 * x * one->in_row;
                mask where = (mask){0} + CHOICE(corner, 0);
#pragma GCC unroll 3
                for (int k = 1; k < 4; k++) { /* the first of equals, as torch has it; NaN stays NaN */
                    vector other = load(four + k % 2 * row + k / 2 * beside);
                    mask better = (other > best) | (other != other);
                    best = (vector)(((mask)other & better) | ((mask)best & ~better));
                    where = (better & CHOICE(corner + k % 2 * one->in_row + k / 2 * one->line, k)) | (where & ~better);
                }
                memcpy(chosen, &where, sizeof where);
                store(to + x * row + j, (vector)((mask)best & ~(best <= 0)));
            }
    }
}

/* change[outs][3][wide] += the sum over a sample's pooled gradients of each times its patch */
INLINE void patch_tile(int outs, int wide, const block *one, const float *picture, const int32_t *chosen,
                       const float *g, float *change) {
    vector sum[4][3][3];
    size_t line = one->line, row = one->out_row, cells = one->cells;
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 3
        for (int y = 0; y < 3; y++)
#pragma GCC unroll 3
            for (int v = 0; v < wide; v++) sum[o][y][v] = all(0);
    for (size_t cell = 0; cell < cells; cell += row)
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            const float *patch = picture + PLACE(chosen[cell + o]);
            vector left = all(g[cell + o]);
#pragma GCC unroll 3
            for (int y = 0; y < 3; y++)
#pragma GCC unroll 3
                for (int v = 0; v < wide; v++) sum[o][y][v] += left * load(patch + y * line + v * LANES);
        }
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 3
        for (int y = 0; y < 3; y++)
#pragma GCC unroll 3
            for (int v = 0; v < wide; v++) {
                float *at = change + (o * 3 + y) * one->run + v * LANES;
                store(at, load(at) + sum[o][y][v]);
            }
}

/* the gradient of the weights, out of that of one sample's pooled values */
static void learn(const block *one, int sample, const float *g) {
    const float *picture = picture_of(one, sample);
    const int32_t *chosen = chosen_of(one, sample);
    for (int v = 0; v < one->run; v += 3 * LANES) {
        const float *from = picture + v;
        float *to = one->change + v;
        int wide = (one->run - v) / LANES, outs = wide == 1 ? 4 : wide == 2 ? 2 : 1;
        for (int o = 0; o < one->out_row; o += outs, to += outs * 3 * one->run)
            if (wide == 1)
                patch_tile(4, 1, one, from, chosen + o, g + o, to);
            else if (wide == 2)
                patch_tile(2, 2, one, from, chosen + o, g + o, to);
            else
                patch_tile(1, 3, one, from, chosen + o, g + o, to);
    }
    for (int j = 0; j < one->out_row; j += LANES) {
        vector sum = all(0);
        for (size_t cell = 0; cell < one->cells; cell += one->out_row) sum += load(g + cell + j);
        store(one->bias_change + j, load(one->bias_change + j) + sum);
    }
}

/* patch[3][3 vectors] += the sum over a list of gradients of each times its weights */
INLINE void weights_tile(const float *g, const int32_t *from, int count, const float *weight, size_t run, float *patch,
                         size_t line) {
    vector sum[3][3];
#pragma GCC unroll 9
    for (int k = 0; k < 9; k++) sum[k / 3][k % 3] = load(patch + k / 3 * line + k % 3 * LANES);
    for (int i = 0; i < count; i++) {
        vector left = all(g[i]);
        const float *right = weight + from[i];
#pragma GCC unroll 9
        for (int k = 0; k < 9; k++) sum[k / 3][k % 3] += left * load(right + k / 3 * run + k % 3 * LANES);
    }
#pragma GCC unroll 9
    for (int k = 0; k < 9; k++) store(patch + k / 3 * line + k % 3 * LANES, sum[k / 3][k % 3]);
}

/* the gradient of the picture, and in its border what is left over. Of the four results of a cell, each has a list of
   the channels for which it was the largest. */
static void pass_back(const block *one, int sample, const float *g) {
    const int32_t *chosen = chosen_of(one, sample);
    int line = one->line, row = one->out_row, each = 3 * one->run;
    memset(one->gradient, 0, one->picture * sizeof(float));
    for (int y = 0; y < one->high; y++)
        for (int x = 0; x < one->wide; x++, chosen += row, g += row) {
            uint64_t counts = 0; /* four, of 16 bits */
            for (int o = 0; o < one->out; o++) {
                int k = WHICH(chosen[o]), at = k * row + (counts >> 16 * k & 0xffff);
                one->amounts[at] = g[o], one->origins[at] = o * each;
                counts += (uint64_t)(g[o] != 0) << 16 * k;
            }
            for (int k = 0; k < 4; k++) {
                float *patch = one->gradient + (2 * y + k / 2) * line + (2 * x + k % 2) * one->in_row;
                for (int v = 0; v < one->run; v += 3 * LANES)
                    weights_tile(one->amounts + k * row, one->origins + k * row, counts >> 16 * k & 0xffff,
                                 one->weight + v, one->run, patch + v, line);
            }
        }
}

/* weights += what a batch has found, and what is added in every step */
static void step_block(const block *one) {
    int n = one->out_row * 3 * one->run;
    for (int i = 0; i < n; i++) one->weight[i] += one->drift ? one->change[i] + one->drift[i] : one->change[i];
    for (int i = 0; i < one->out_row; i++)
        one->bias[i] += one->drift ? one->bias_change[i] + one->bias_drift[i] : one->bias_change[i];
}

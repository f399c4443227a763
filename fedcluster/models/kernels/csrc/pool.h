/* The way of a sample through a block. Windows of pooling are 2x2; or 3x3, so that they overlap, and then as many as
   half the size, rounded up: around an odd size there is a row of nothing, after an even one too. ReLU is taken after
   pooling, which is the same function. */

#pragma once

#include "conv.h"
#include "normalise.h"

/* the patch of the largest result of a window: its place in the picture, and which of the window it is */
#define CHOICE(place, which) ((place) * 16 + (which))
#define PLACE(choice) ((choice) >> 4)
#define WHICH(choice) ((choice) & 15)

static int32_t *chosen_of(const block *one, int sample) { return one->chosen + sample % one->kept * one->cells; }

static void place_windows(block *one) {
    int overlap = one->window == 3;
    one->top = overlap ? one->height % 2 : 0, one->left = overlap ? one->width % 2 : 0;
    one->high = (one->height + overlap) / 2, one->wide = (one->width + overlap) / 2;
    one->across = overlap ? one->width : 2 * one->wide;
    one->cells = (size_t)one->high * one->wide * one->out_row;
}

/* the largest of some rows and columns of a window, by channel. Of equals the first, as torch has it; NaN stays NaN. */
INLINE void largest(const block *one, int window, int above, int below, int before, int after, const float *results,
                    int corner, float *to, int32_t *chosen) {
    int row = one->out_row, beside = one->across * row;
    for (int j = 0; j < row; j += LANES, results += LANES) {
        vector best = load(results + above * beside + before * row);
        mask where = {0};
#pragma GCC unroll 3
        for (int r = above; r < below; r++)
#pragma GCC unroll 3
            for (int c = before; c < after; c++) {
                vector other = load(results + r * beside + c * row);
                int here = CHOICE(corner + r * one->line + c * one->in_row, r * window + c);
                mask better = (other > best) | (other != other);
                if (r == above && c == before) better = ~(mask){0};
                best = (vector)(((mask)other & better) | ((mask)best & ~better));
                where = (better & here) | (where & ~better);
            }
        memcpy(chosen + j, &where, sizeof where);
        store(to + j, (vector)((mask)best & ~(best <= 0)));
    }
}

/* a row of what pooling makes, out of the rows of results that it is made of */
INLINE void pool(const block *one, int window, int y, int32_t *chosen, float *to, int to_row) {
    int row = one->out_row, first = 2 * y - one->top;
    int above = first < 0 ? -first : 0, below = one->height - first < window ? one->height - first : window;
    for (int x = 0; x < one->wide; x++, chosen += row, to += to_row) {
        int start = 2 * x - one->left, corner = first * one->line + start * one->in_row;
        int before = start < 0 ? -start : 0, after = one->width - start < window ? one->width - start : window;
        const float *results = one->results + start * row;
        if (window == 2 || below - above + after - before == 2 * window)
            largest(one, window, 0, window, 0, window, results, corner, to, chosen);
        else
            largest(one, window, above, below, before, after, results, corner, to, chosen);
    }
}

/* one sample through the block; what it makes has its rows to_line, its pixels to_row apart */
static void pass(const block *one, int sample, float *to, int to_line, int to_row) {
    const float *picture = picture_of(one, sample);
    int row = one->out_row, again = one->window - 2;
    size_t beside = one->across * row, each = one->wide * row, at = sample % one->kept * one->cells;
    for (int y = 0; y < one->high; y++, to += to_line, at += each) {
        int first = 2 * y - one->top, from = y ? first + again : first + one->top, end = first + one->window;
        if (y && again) memcpy(one->results, one->results + 2 * beside, beside * sizeof(float));
        if (end > one->height) end = one->height;
        convolve(one, picture + from * one->line, end - from, one->results + (from - first) * beside);
        float *pooled = one->normalised ? one->pooled + at : to;
        int pooled_row = one->normalised ? row : to_row;
        if (one->window == 2)
            pool(one, 2, y, one->chosen + at, pooled, pooled_row);
        else
            pool(one, 3, y, one->chosen + at, pooled, pooled_row);
        if (one->normalised) normalise(one, pooled, one->sums + at, to, to_row);
    }
}

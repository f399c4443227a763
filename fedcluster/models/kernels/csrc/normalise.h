/* Local response normalisation over a band of channels, as in layers.py. On a pixel x, with a = ALPHA / (2 RADIUS + 1):

   s = 1 + a sum of x^2 over the band,   y = x s^-0.75
   dx = dy s^-0.75 - 1.5 a x sum of (dy x s^-1.75) over the band */

#pragma once

#include <math.h>

#include "conv.h"

enum { RADIUS = 4 };
static const float A = 0.001f / (2 * RADIUS + 1);

static size_t margin_of(const block *one) { return one->out_row + 2 * LANES; }

/* the sum over the band around each of n channels, which lie between zeros */
INLINE void sum_band(const float *from, int n, float *restrict to) {
    for (int j = 0; j < n; j += LANES) {
        vector sum = load(from + j - RADIUS);
#pragma GCC unroll 8
        for (int k = 1; k <= 2 * RADIUS; k++) sum += load(from + j - RADIUS + k);
        store(to + j, sum);
    }
}

/* a row of pixels; sums are kept for the way back */
static void normalise(const block *one, const float *restrict x, float *restrict sums, float *restrict y, int y_row) {
    int row = one->out_row;
    size_t apart = margin_of(one);
    float *square = one->margin + LANES;
    for (int i = 0; i < one->wide; i++)
        for (int j = 0; j < row; j++) square[i * apart + j] = x[i * row + j] * x[i * row + j];
    for (int i = 0; i < one->wide; i++, x += row, sums += row, y += y_row) {
        sum_band(square + i * apart, row, sums);
        for (int j = 0; j < row; j++) {
            float root = sqrtf(1 + A * sums[j]);
            y[j] = x[j] / (root * sqrtf(root));
        }
    }
}

/* the gradient at what is normalised, out of that at what came of it; both [cells] of a sample */
static void normalise_back(const block *one, int sample, const float *restrict g, float *restrict to) {
    int row = one->out_row;
    size_t at = sample % one->kept * one->cells, apart = margin_of(one);
    const float *restrict x = one->pooled + at, *restrict sums = one->sums + at;
    float *around = one->margin + LANES;
    for (int y = 0; y < one->high; y++) {
        for (int i = 0; i < one->wide; i++, x += row, sums += row, g += row, to += row)
            for (int j = 0; j < row; j++) {
                float s = 1 + A * sums[j], root = sqrtf(s);
                to[j] = g[j] / (root * sqrtf(root));
                around[i * apart + j] = to[j] * x[j] / s;
            }
        x -= one->wide * row, to -= one->wide * row;
        for (int i = 0; i < one->wide; i++, x += row, to += row)
            for (int j = 0; j < row; j += LANES) {
                float sum[LANES];
                sum_band(around + i * apart + j, LANES, sum);
                store(to + j, load(to + j) - 1.5f * A * load(x + j) * load(sum));
            }
    }
}

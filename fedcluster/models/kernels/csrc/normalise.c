/* Local response normalisation over a band of channels, as in models/layers.py. With a = ALPHA / (2 RADIUS + 1), for
   every pixel x:

   s = 1 + a sum of x^2 over the band,   y = x s^-0.75
   dx = dy s^-0.75 - 1.5 a x sum of (dy x s^-1.75) over the band */

#include <math.h>

#include "conv_parts.h"

enum { RADIUS = 4 };
static const float A = 0.001f / (2 * RADIUS + 1);

/* the sum over the band around each of n channels, which lie between zeros */
INLINE void sum_over_band(const float *from, int n, float *restrict to) {
    for (int j = 0; j < n; j += LANES) {
        vector sum = load(from + j - RADIUS);
#pragma GCC unroll 8
        for (int k = 1; k <= 2 * RADIUS; k++) sum += load(from + j - RADIUS + k);
        store(to + j, sum);
    }
}

void normalise(const conv_block *block, const float *restrict x, float *restrict squares, float *restrict y,
               int y_pixel) {
    int row = block->shape.out_stride, width = block->shape.pooled_width;
    size_t stride = band_stride(&block->shape);
    float *square = block->act.band_row + LANES;
    for (int i = 0; i < width; i++)
        for (int j = 0; j < row; j++) square[i * stride + j] = x[i * row + j] * x[i * row + j];
    for (int i = 0; i < width; i++, x += row, squares += row, y += y_pixel) {
        sum_over_band(square + i * stride, row, squares);
        for (int j = 0; j < row; j++) {
            float root = sqrtf(1 + A * squares[j]);
            y[j] = x[j] / (root * sqrtf(root));
        }
    }
}

void normalise_backward(const conv_block *block, int sample, const float *restrict y_grad, float *restrict x_grad) {
    const conv_shape *s = &block->shape;
    int row = s->out_stride, width = s->pooled_width;
    size_t at = sample % s->cached * s->pooled_size, stride = band_stride(s);
    const float *restrict x = block->act.pooled + at, *restrict squares = block->act.squares + at;
    float *around = block->act.band_row + LANES;
    for (int y = 0; y < s->pooled_height; y++) {
        for (int i = 0; i < width; i++, x += row, squares += row, y_grad += row, x_grad += row)
            for (int j = 0; j < row; j++) {
                float sum = 1 + A * squares[j], root = sqrtf(sum);
                x_grad[j] = y_grad[j] / (root * sqrtf(root));
                around[i * stride + j] = x_grad[j] * x[j] / sum;
            }
        x -= width * row, x_grad -= width * row;
        for (int i = 0; i < width; i++, x += row, x_grad += row)
            for (int j = 0; j < row; j += LANES) {
                float sum[LANES];
                sum_over_band(around + i * stride + j, LANES, sum);
                store(x_grad + j, load(x_grad + j) - 1.5f * A * load(x + j) * load(sum));
            }
    }
}

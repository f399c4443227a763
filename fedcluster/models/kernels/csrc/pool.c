/* One sample through a block: convolution, max-pooling, ReLU and normalisation, row by row. */

#include <string.h>

#include "conv_parts.h"

/* The largest of some rows and columns of a window, by channel. Of equal values the first, as in torch; NaN stays NaN. */
INLINE void max_of_window(const conv_shape *s, int window, int top, int bottom, int left, int right,
                          const float *results, int corner, float *to, int32_t *argmax) {
    int row = s->out_stride, line = s->conv_width * row;
    for (int j = 0; j < row; j += LANES, results += LANES) {
        vector best = load(results + top * line + left * row);
        mask where = {0};
#pragma GCC unroll 3
        for (int r = top; r < bottom; r++)
#pragma GCC unroll 3
            for (int c = left; c < right; c++) {
                vector other = load(results + r * line + c * row);
                int here = ARGMAX(corner + r * s->line_stride + c * s->pixel_stride, r * window + c);
                mask better = (other > best) | (other != other);
                if (r == top && c == left) better = ~(mask){0};
                best = (vector)(((mask)other & better) | ((mask)best & ~better));
                where = (better & here) | (where & ~better);
            }
        memcpy(argmax + j, &where, sizeof where);
        store(to + j, relu(best));
    }
}

/* A row of pooled values, from the rows of results that its windows cover. */
INLINE void pool_row(const conv_block *block, int window, int y, int32_t *argmax, float *to, int to_pixel) {
    const conv_shape *s = &block->shape;
    int row = s->out_stride, first = 2 * y - s->pad_top;
    int top = first < 0 ? -first : 0, bottom = min(s->result_height - first, window);
    for (int x = 0; x < s->pooled_width; x++, argmax += row, to += to_pixel) {
        int start = 2 * x - s->pad_left, corner = first * s->line_stride + start * s->pixel_stride;
        int left = start < 0 ? -start : 0, right = min(s->result_width - start, window);
        const float *results = block->act.conv_rows + start * row;
        if (window == 2 || bottom - top + right - left == 2 * window)
            max_of_window(s, window, 0, window, 0, window, results, corner, to, argmax);
        else
            max_of_window(s, window, top, bottom, left, right, results, corner, to, argmax);
    }
}

void conv_forward(const conv_block *block, int sample, float *to, int to_line, int to_pixel) {
    const conv_shape *s = &block->shape;
    const conv_activations *act = &block->act;
    const float *image = image_of(block, sample);
    int row = s->out_stride, shared = s->window - 2; /* rows of results that two windows have in common */
    size_t line = s->conv_width * row, pooled_line = s->pooled_width * row;
    size_t at = sample % s->cached * s->pooled_size;
    for (int y = 0; y < s->pooled_height; y++, to += to_line, at += pooled_line) {
        int first = 2 * y - s->pad_top, from = y ? first + shared : first + s->pad_top, end = first + s->window;
        if (y && shared) memcpy(act->conv_rows, act->conv_rows + 2 * line, line * sizeof(float));
        if (end > s->result_height) end = s->result_height;
        convolve(block, image + from * s->line_stride, end - from, act->conv_rows + (from - first) * line);
        float *pooled = s->normalised ? act->pooled + at : to;
        int pooled_pixel = s->normalised ? row : to_pixel;
        if (s->window == 2)
            pool_row(block, 2, y, act->argmax + at, pooled, pooled_pixel);
        else
            pool_row(block, 3, y, act->argmax + at, pooled, pooled_pixel);
        if (s->normalised) normalise(block, pooled, act->squares + at, to, to_pixel);
    }
}

/* The steps that a block consists of; conv.h has the whole. */

#pragma once

#include "conv.h"
#include "simd.h"

/* conv.c: rows of results [rows][conv_width][out_stride], from the line of the image where the first patch begins */
void convolve(const conv_block *block, const float *image, int rows, float *results);

/* normalise.c: one row of pixels; the sums of squares are kept for the backward pass */
void normalise(const conv_block *block, const float *restrict x, float *restrict squares, float *restrict y,
               int y_pixel);
/* the gradient at the input of normalisation, from that at its output, both [pooled_size] of a sample */
void normalise_backward(const conv_block *block, int sample, const float *restrict y_grad, float *restrict x_grad);

/* floats from one pixel of band_row to the next: channels between zeros */
static inline size_t band_stride(const conv_shape *s) { return s->out_stride + 2 * LANES; }

/* overlap_backward.c: see there */
void bucket_terms(const conv_block *block, int sample, const float *grad);
void weight_grad_by_channel(const conv_block *block, int first, int end);
void image_grad_by_result(const conv_block *block, int first, int end);

static inline float *image_grad_of(const conv_block *block, int sample) {
    return block->grad.images + sample % block->shape.group * block->shape.image_size;
}

/* pool.c records in `argmax` the offset of the patch whose result is the largest of a window, and which of the window's
   results it is. */
#define ARGMAX(offset, which) ((offset) * 16 + (which))
#define OFFSET_OF(argmax) ((argmax) >> 4)
#define WHICH_OF(argmax) ((argmax) & 15)

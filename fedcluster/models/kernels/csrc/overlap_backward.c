/* The backward pass of a block whose pooling windows overlap. Several windows may have chosen the same result of the
   convolution: their gradients are added up first, in `results`. What is not zero there goes into two sets of lists:
   for every result the channels, for every channel the patches that it is multiplied with.

   A tile goes through all lists of a group of samples, so that what it needs of the weights, or of an image, stays in
   the innermost cache. */

#include <string.h>

#include "patch_tiles.h"

static term *terms_by_result(const conv_block *block, int sample) {
    return block->grad.by_result + sample % block->shape.group * (block->shape.pooled_size + 1);
}

/* [out_channels][pooled_height * pooled_width + 1] */
static term *terms_by_channel(const conv_block *block, int sample) {
    const conv_shape *s = &block->shape;
    return block->grad.by_channel + sample % s->group * (s->pooled_size + s->out_stride);
}

static int32_t *counts_of(const conv_block *block, int sample) {
    const conv_shape *s = &block->shape;
    return block->grad.counts + sample % s->group * (s->out_stride + s->result_height * s->result_width);
}

/* A term is always written, and counted if it is not zero: there is no branch to mispredict, and every list has room for
   one term more. */
void bucket_terms(const conv_block *block, int sample, const float *pooled_grad) {
    const conv_shape *s = &block->shape;
    const int32_t *argmax = argmax_of(block, sample);
    int row = s->out_stride, out = s->out_channels, channel = s->kernel * s->kernel_stride;
    int list_size = s->pooled_height * s->pooled_width + 1, step[9];
    for (int k = 0; k < 9; k++) step[k] = (k / 3 * s->result_width + k % 3) * row;
    float *results = block->grad.results;
    for (int y = 0; y < s->pooled_height; y++)
        for (int x = 0; x < s->pooled_width; x++, argmax += row, pooled_grad += row) {
            int corner = ((2 * y - s->pad_top) * s->result_width + 2 * x - s->pad_left) * row;
            for (int o = 0; o < out; o++) results[corner + step[WHICH_OF(argmax[o])] + o] += pooled_grad[o];
        }
    const float *grad = results;
    term *of_result = terms_by_result(block, sample), *of_channel = terms_by_channel(block, sample);
    int32_t *channel_count = counts_of(block, sample), *result_count = channel_count + row;
    memset(channel_count, 0, row * sizeof(int32_t));
    for (int y = 0; y < s->result_height; y++)
        for (int x = 0; x < s->result_width; x++, grad += row) {
            int patch = y * s->line_stride + x * s->pixel_stride;
            term *begin = of_result;
            for (int o = 0; o < out; o++) {
                int counts = grad[o] != 0, at = o * list_size + channel_count[o];
                *of_result = (term){grad[o], o * channel}, of_result += counts;
                of_channel[at] = (term){grad[o], patch}, channel_count[o] += counts;
            }
            *result_count++ = of_result - begin;
        }
    memset(results, 0, (size_t)s->result_height * s->result_width * row * sizeof(float));
}

INLINE void weight_grad_tile(int size, int vectors, const conv_block *block, int sample, int at) {
    const conv_shape *s = &block->shape;
    const term *terms = terms_by_channel(block, sample);
    const int32_t *count = counts_of(block, sample);
    const float *image = image_of(block, sample) + at;
    float *grad = block->grad.weight + at;
    for (int o = 0; o < s->out_channels; o++) {
        add_terms(size, vectors, terms, count[o], image, s->line_stride, grad, s->kernel_stride);
        terms += s->pooled_height * s->pooled_width + 1, grad += size * s->kernel_stride;
    }
}

void weight_grad_by_channel(const conv_block *block, int first, int end) {
#define CALL(SIZE, VECTORS, AT) \
    for (int i = first; i < end; i++) weight_grad_tile(SIZE, VECTORS, block, i, AT)
    FOR_PATCH_TILES(&block->shape, CALL)
#undef CALL
}

INLINE void image_grad_tile(int size, int vectors, const conv_block *block, int sample, int at) {
    const conv_shape *s = &block->shape;
    const term *terms = terms_by_result(block, sample);
    const int32_t *count = counts_of(block, sample) + s->out_stride;
    float *grad = image_grad_of(block, sample) + at;
    for (int y = 0; y < s->result_height; y++)
        for (int x = 0; x < s->result_width; x++, terms += *count++)
            add_terms(size, vectors, terms, *count, block->weights.weight + at, s->kernel_stride,
                      grad + y * s->line_stride + x * s->pixel_stride, s->line_stride);
}

void image_grad_by_result(const conv_block *block, int first, int end) {
    const conv_shape *s = &block->shape;
    for (int i = first; i < end; i++) memset(image_grad_of(block, i), 0, s->image_size * sizeof(float));
#define CALL(SIZE, VECTORS, AT) \
    for (int i = first; i < end; i++) image_grad_tile(SIZE, VECTORS, block, i, AT)
    FOR_PATCH_TILES(s, CALL)
#undef CALL
}

/* The backward pass of a block. Max-pooling passes one result of every window on, so the gradient at a pooled value
   concerns a single patch of the image: the patch times it is added to the gradient of the weights, and the weights
   times it to the gradient of the patch. Where windows do not overlap, that is a quarter of the products which the
   gradients at all results would take. Where they do, see overlap_backward.c. */

#include <string.h>

#include "patch_tiles.h"

/* grad[channels][size][vectors] += the sum over a sample's pooled values of each gradient times its patch */
INLINE void weight_grad_tile(int size, int channels, int vectors, const conv_shape *s, const float *image,
                             const int32_t *argmax, const float *pooled_grad, float *grad) {
    vector sum[4][MAX_KERNEL][3];
    size_t line = s->line_stride, row = s->out_stride, pooled_size = s->pooled_size;
#pragma GCC unroll 4
    for (int o = 0; o < channels; o++)
#pragma GCC unroll 5
        for (int y = 0; y < size; y++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sum[o][y][v] = broadcast(0);
    for (size_t pixel = 0; pixel < pooled_size; pixel += row)
#pragma GCC unroll 4
        for (int o = 0; o < channels; o++) {
            const float *patch = image + OFFSET_OF(argmax[pixel + o]);
            vector left = broadcast(pooled_grad[pixel + o]);
#pragma GCC unroll 5
            for (int y = 0; y < size; y++)
#pragma GCC unroll 3
                for (int v = 0; v < vectors; v++) sum[o][y][v] += left * load(patch + y * line + v * LANES);
        }
#pragma GCC unroll 4
    for (int o = 0; o < channels; o++)
#pragma GCC unroll 5
        for (int y = 0; y < size; y++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) {
                float *at = grad + (o * size + y) * s->kernel_stride + v * LANES;
                store(at, load(at) + sum[o][y][v]);
            }
}

INLINE void weight_grad_tiles(int size, int vectors, const conv_shape *s, const float *image, const int32_t *argmax,
                              const float *pooled_grad, float *grad) {
    int channels = vectors == 1 ? (size == 3 ? 4 : 2) : vectors == 2 && size == 3 ? 2 : 1;
    for (int o = 0; o < s->out_channels; o += channels)
        weight_grad_tile(size, channels, vectors, s, image, argmax + o, pooled_grad + o,
                         grad + (size_t)o * size * s->kernel_stride);
}

/* the gradient of the weights, from that at one sample's pooled values */
static void weight_grad(const conv_block *block, int sample, const float *pooled_grad) {
    const conv_shape *s = &block->shape;
    const float *image = image_of(block, sample);
    const int32_t *argmax = argmax_of(block, sample);
#define CALL(SIZE, VECTORS, AT) \
    weight_grad_tiles(SIZE, VECTORS, s, image + AT, argmax, pooled_grad, block->grad.weight + AT)
    FOR_PATCH_TILES(s, CALL)
#undef CALL
}

static void bias_grad(const conv_block *block, const float *pooled_grad, size_t n) {
    float *grad = block->grad.bias;
    for (int j = 0; j < block->shape.out_stride; j += LANES) {
        vector sum = broadcast(0);
        for (size_t pixel = 0; pixel < n; pixel += block->shape.out_stride) sum += load(pooled_grad + pixel + j);
        store(grad + j, load(grad + j) + sum);
    }
}

/* The gradient at the image; what falls into its border is ignored. Of the four results of a window, each gets a list of
   the channels for which it was the largest. */
static void image_grad(const conv_block *block, int sample, const float *pooled_grad) {
    const conv_shape *s = &block->shape;
    const int32_t *argmax = argmax_of(block, sample);
    int row = s->out_stride, channel = s->kernel * s->kernel_stride;
    term *terms = block->grad.by_result;
    float *grad = image_grad_of(block, sample);
    memset(grad, 0, s->image_size * sizeof(float));
    for (int y = 0; y < s->pooled_height; y++)
        for (int x = 0; x < s->pooled_width; x++, argmax += row, pooled_grad += row) {
            uint64_t counts = 0; /* four of 16 bits each */
            for (int o = 0; o < s->out_channels; o++) {
                int k = WHICH_OF(argmax[o]);
                terms[k * row + (counts >> 16 * k & 0xffff)] = (term){pooled_grad[o], o * channel};
                counts += (uint64_t)(pooled_grad[o] != 0) << 16 * k;
            }
            for (int k = 0; k < 4; k++) {
                float *patch = grad + (2 * y + k / 2) * s->line_stride + (2 * x + k % 2) * s->pixel_stride;
#define CALL(SIZE, VECTORS, AT)                                                                                      \
    add_terms(SIZE, VECTORS, terms + k * row, counts >> 16 * k & 0xffff, block->weights.weight + AT,                 \
              s->kernel_stride, patch + AT, s->line_stride)
                FOR_PATCH_TILES(s, CALL)
#undef CALL
            }
        }
}

/* the gradient at the input, from that at the image, through the ReLU of the block before */
static void input_grad(const conv_block *block, int sample, float *to) {
    const conv_shape *s = &block->shape;
    int pixels = s->row_segments > 1 ? 1 : s->width, n = pixels * s->in_depth; /* that lie side by side */
    const float *image = image_of(block, sample) + border_of(s), *grad = image_grad_of(block, sample) + border_of(s);
    for (int y = 0; y < s->height; y++)
        for (int x = 0; x < s->width; x += pixels, to += n) {
            size_t at = y * s->line_stride + x * s->pixel_stride;
            relu_backward(image + at, grad + at, n, to);
        }
}

/* `grad` is zero where the block's output is not above zero: ReLU's derivative, which normalisation leaves as it is. */
void conv_backward(const conv_block *block, const float *grad, int first, int end, int with_input_grad) {
    const conv_shape *s = &block->shape;
    if (s->normalised) {
        for (int i = first; i < end; i++) {
            size_t at = (i - first) * s->pooled_size;
            normalise_backward(block, i, grad + at, block->grad.pooled + at);
        }
        grad = block->grad.pooled;
    }
    bias_grad(block, grad, (end - first) * s->pooled_size);
    int overlap = with_input_grad && s->window == 3;
    for (int i = first; i < end; i++) {
        const float *pooled_grad = grad + (i - first) * s->pooled_size;
        if (overlap) {
            bucket_terms(block, i, pooled_grad);
        } else {
            weight_grad(block, i, pooled_grad);
            if (with_input_grad) image_grad(block, i, pooled_grad);
        }
    }
    if (overlap) {
        weight_grad_by_channel(block, first, end);
        image_grad_by_result(block, first, end);
    }
    if (!with_input_grad) return;
    size_t input_size = (size_t)s->height * s->width * s->in_depth;
    for (int i = first; i < end; i++) input_grad(block, i, block->grad.input + (i - first) * input_size);
}

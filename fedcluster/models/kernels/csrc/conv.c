/* The geometry and the weights of a block, and the convolution itself. */

#include "conv.h"

#include <string.h>

#include "conv_parts.h"
#include "matmul.h"
#include "transpose.h"

enum { FORWARD_CHUNK = 320 }; /* products at a time of each result, so that the weights stay in the innermost cache */

conv_shape shape_conv(int in_channels, int height, int width, int out_channels, int kernel, int padding, int window,
                      int normalised, int first) {
    conv_shape s = {.in_channels = in_channels, .out_channels = out_channels, .height = height, .width = width};
    s.kernel = kernel, s.padding = padding, s.window = window, s.normalised = normalised;
    s.in_depth = first ? in_channels : padded(in_channels), s.out_stride = padded(out_channels);

    /* A row of a patch is one segment; but where pixels would all fall into a few sets of the cache, they are moved
       apart by one cache line, and each is a segment. */
    int crowded = s.in_depth % 64 == 0;
    s.pixel_stride = s.in_depth + (crowded ? 16 : 0), s.line_stride = (width + 2 * padding) * s.pixel_stride;
    s.kernel_stride = padded(kernel * s.pixel_stride);
    s.row_segments = crowded ? kernel : 1, s.segment = crowded ? s.in_depth : kernel * s.in_depth;
    for (int k = 0; k < kernel * s.row_segments; k++)
        s.segment_offset[k] = k / s.row_segments * s.line_stride + k % s.row_segments * s.pixel_stride;
    s.image_size = (size_t)(height + 2 * padding) * s.line_stride;

    /* Windows of 3 overlap; there are half as many as results, rounded up: outside the results, there is a row before an
       odd size and one after every size. */
    int overlap = window == 3;
    height += 2 * padding - kernel + 1, width += 2 * padding - kernel + 1;
    s.result_height = height, s.result_width = width;
    s.pad_top = overlap ? height % 2 : 0, s.pad_left = overlap ? width % 2 : 0;
    s.pooled_height = (height + overlap) / 2, s.pooled_width = (width + overlap) / 2;
    s.conv_width = overlap ? width : 2 * s.pooled_width;
    s.pooled_size = (size_t)s.pooled_height * s.pooled_width * s.out_stride;
    return s;
}

void plan_conv(conv_block *block, arena *memory, conv_shape s, int first, int training, int with_offset) {
    int64_t weights = (int64_t)s.out_stride * s.kernel * s.kernel_stride, kept = s.cached * s.pooled_size;
    int64_t results = (int64_t)s.result_height * s.result_width, pixels = (int64_t)s.height * s.width;
    *block = (conv_block){.shape = s};
    conv_weights *w = &block->weights;
    w->weight = take(memory, weights);
    w->bias = take(memory, s.out_stride);
    w->tiles = take(memory, s.kernel * s.row_segments * s.segment * s.out_stride);

    conv_activations *act = &block->act;
    act->images = take(memory, s.cached * s.image_size + s.kernel_stride); /* the last patch is read in whole vectors */
    act->argmax = take(memory, kept);
    act->conv_rows = take(memory, s.window * s.conv_width * s.out_stride);
    if (s.normalised) {
        act->pooled = take(memory, kept);
        act->squares = take(memory, kept);
        act->band_row = take(memory, s.pooled_width * band_stride(&s));
    }

    conv_gradients *grad = &block->grad;
    if (training) {
        grad->weight = take(memory, weights);
        grad->bias = take(memory, s.out_stride);
        if (s.normalised) grad->pooled = take(memory, s.group * s.pooled_size);
    }
    if (training && !first) {
        grad->images = take(memory, s.group * s.image_size);
        grad->input = take(memory, s.group * pixels * s.in_depth);
        grad->by_result = take(memory, 2 * (s.window == 2 ? 4 * (size_t)s.out_stride : s.group * (s.pooled_size + 1)));
    }
    if (training && !first && s.window == 3) {
        grad->by_channel = take(memory, 2 * s.group * (s.pooled_size + s.out_stride));
        grad->counts = take(memory, s.group * (s.out_stride + results));
        grad->results = take(memory, results * s.out_stride);
    }
    if (with_offset) {
        w->offset = take(memory, weights);
        w->bias_offset = take(memory, s.out_stride);
    }
}

const float *pack_conv(const conv_block *block, const float *w, float *weight, float *bias) {
    const conv_shape *s = &block->shape;
    int size = s->kernel;
    memset(weight, 0, (size_t)s->out_stride * size * s->kernel_stride * sizeof(float));
    memset(bias, 0, s->out_stride * sizeof(float));
    for (int o = 0; o < s->out_channels; o++)
        for (int c = 0; c < s->in_channels; c++)
            for (int y = 0; y < size; y++)
                for (int x = 0; x < size; x++)
                    weight[(o * size + y) * s->kernel_stride + x * s->pixel_stride + c] = *w++;
    memcpy(bias, w, s->out_channels * sizeof(float));
    return w + s->out_channels;
}

float *unpack_conv(const conv_block *block, float *w) {
    const conv_shape *s = &block->shape;
    const float *weight = block->weights.weight;
    int size = s->kernel;
    for (int o = 0; o < s->out_channels; o++)
        for (int c = 0; c < s->in_channels; c++)
            for (int y = 0; y < size; y++)
                for (int x = 0; x < size; x++)
                    *w++ = weight[(o * size + y) * s->kernel_stride + x * s->pixel_stride + c];
    memcpy(w, block->weights.bias, s->out_channels * sizeof(float));
    return w + s->out_channels;
}

/* Borders and margins are zero from here on: nothing writes to them. */
void prepare_conv(const conv_block *block) {
    const conv_shape *s = &block->shape;
    memset(block->act.images, 0, (s->cached * s->image_size + s->kernel_stride) * sizeof(float));
    if (s->normalised) memset(block->act.band_row, 0, s->pooled_width * band_stride(s) * sizeof(float));
    if (block->grad.results)
        memset(block->grad.results, 0, (size_t)s->result_height * s->result_width * s->out_stride * sizeof(float));
    pack_tiles(block);
}

/* For each tile of one or two vectors of channels, what it needs of the weights, [kernel][segment][channel]. */
void pack_tiles(const conv_block *block) {
    const conv_shape *s = &block->shape;
    size_t channel = s->kernel * s->kernel_stride, terms = s->kernel * s->row_segments * s->segment;
    for (int j = 0, wide; j < s->out_stride; j += wide) {
        wide = s->out_stride - j >= 2 * LANES ? 2 * LANES : LANES;
        for (int k = 0; k < s->kernel * s->row_segments; k++)
            transpose(block->weights.weight + j * channel + k / s->row_segments * s->kernel_stride +
                          k % s->row_segments * s->pixel_stride,
                      channel, wide, s->segment, block->weights.tiles + j * terms + k * s->segment * wide, wide);
    }
}

void load_image(const conv_block *block, const float *planes, int height, int width, int sample) {
    const conv_shape *s = &block->shape;
    int top = (height - s->height) / 2, left = (width - s->width) / 2;
    float *image = image_of(block, sample) + border_of(s);
    for (int c = 0; c < s->in_channels; c++, planes += height * width)
        for (int y = 0; y < s->height; y++) {
            const float *from = planes + (y + top) * width + left;
            float *to = image + y * s->line_stride + c;
            for (int x = 0; x < s->width; x++) to[x * s->pixel_stride] = from[x];
        }
}

void convolve(const conv_block *block, const float *image, int rows, float *results) {
    const conv_shape *s = &block->shape;
    int row = s->out_stride, m = s->conv_width, segments = s->kernel * s->row_segments;
    int tiles = (rows * m + TILE_ROWS - 1) / TILE_ROWS;
    int several = FORWARD_CHUNK / s->segment > 1 ? FORWARD_CHUNK / s->segment : 1;
    for (int j = 0; j < row; j += 2 * LANES) {
        int vectors = row - j >= 2 * LANES ? 2 : 1;
        const float *weight = block->weights.tiles + (size_t)j * segments * s->segment;
        for (int k = 0, count; k < segments; k += count, weight += count * s->segment * vectors * LANES) {
            count = segments - k < several ? segments - k : several;
            for (int tile = 0, i = 0; tile < tiles; tile++) { /* about equal: small ones are slow */
                int here = (rows * m - i) / (tiles - tile);
                const float *from[TILE_ROWS];
                for (int r = 0; r < here; r++)
                    from[r] = image + (i + r) / m * s->line_stride + (i + r) % m * s->pixel_stride;
                float *to = results + (size_t)i * row + j;
                const float *start = k ? to : block->weights.bias + j;
                int start_row = k ? row : 0;
#define CALL(R)                                                                                                      \
    if (vectors == 2)                                                                                                \
        matmul_tile(R, 2, count, s->segment_offset + k, from, weight, 16, s->segment, start, start_row, to, row, 0); \
    else                                                                                                             \
        matmul_tile(R, 1, count, s->segment_offset + k, from, weight, 8, s->segment, start, start_row, to, row, 0)
                DISPATCH_ROWS(here, CALL)
#undef CALL
                i += here;
            }
        }
    }
}

void clear_conv_grad(const conv_block *block) {
    const conv_shape *s = &block->shape;
    memset(block->grad.weight, 0, (size_t)s->out_stride * s->kernel * s->kernel_stride * sizeof(float));
    memset(block->grad.bias, 0, s->out_stride * sizeof(float));
}

void update_conv(const conv_block *block, int overwrite) {
    const conv_shape *s = &block->shape;
    const conv_weights *w = &block->weights;
    const conv_gradients *grad = &block->grad;
    int n = s->out_stride * s->kernel * s->kernel_stride;
    if (overwrite) {
        memset(w->weight, 0, (size_t)n * sizeof(float));
        memset(w->bias, 0, s->out_stride * sizeof(float));
    }
    for (int i = 0; i < n; i++) w->weight[i] += w->offset ? grad->weight[i] + w->offset[i] : grad->weight[i];
    for (int i = 0; i < s->out_stride; i++)
        w->bias[i] += w->offset ? grad->bias[i] + w->bias_offset[i] : grad->bias[i];
    pack_tiles(block);
}

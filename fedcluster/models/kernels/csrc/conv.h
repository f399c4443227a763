/* A block: a convolution 3x3 or 5x5, perhaps with zeros around, max-pooling with stride 2, ReLU, perhaps local response
   normalisation. ReLU comes after pooling, which is the same function on a quarter of the numbers.

   An image is held as [y][x][channel] inside a border of zeros. The patch of a result then consists of a few segments
   of memory, and a row of results is a product with a matrix whose rows overlap: nothing is unfolded. Channels are
   padded to whole vectors, except those of the samples. */

#pragma once

#include <stddef.h>

#include "engine.h"
#include "workspace.h"

/* Sizes are in numbers, strides in floats. */
typedef struct {
    int in_channels, out_channels, height, width; /* of the input */
    int kernel, padding, window, normalised;      /* padding: rows and columns of zeros on every side */
    int result_height, result_width;              /* of the convolution */
    int pooled_height, pooled_width, conv_width;  /* after pooling; results of a row that pooling looks at */
    int pad_top, pad_left;                        /* rows and columns of the first window outside the results */

    int in_depth, pixel_stride, line_stride; /* of images: channels of a pixel, next pixel, next row */
    int out_stride;                          /* of results: next pixel, that is, padded channels */
    int kernel_stride;                       /* of weights: next row of the kernel */
    int row_segments, segment;               /* of a patch: segments in one of its rows, and the floats of each */
    int segment_offset[MAX_KERNEL * MAX_KERNEL]; /* of all segments of a patch, from its corner */
    size_t image_size, pooled_size;              /* of one sample, with border and padding */

    int cached; /* samples whose activations are kept: the batch in training, else 1 */
    int group;  /* samples whose gradients are kept: a group of the backward pass */
} conv_shape;

typedef struct {
    float *weight, *bias;        /* [out_stride][kernel][kernel_stride] and [out_stride] */
    float *tiles;                /* the weights again, in the order in which the forward product reads them */
    float *offset, *bias_offset; /* added in every step, in the layout of `weight` and `bias`; or NULL */
} conv_weights;

/* What the forward pass leaves for the backward pass, [cached][...], and rows that it works on. */
typedef struct {
    float *images;           /* input */
    int32_t *argmax;         /* of every pooled value, where it comes from: see pool.h */
    float *pooled, *squares; /* for normalisation: its input, and sums of squares over the band of channels */
    float *conv_rows;        /* [window][conv_width][out_stride] */
    float *band_row;         /* [pooled_width][band_stride], for normalisation */
} conv_activations;

/* A number of the gradient, and the offset of what it is multiplied with: a patch, or the weights of a channel. */
typedef struct {
    float grad;
    int32_t offset;
} term;

/* Memory of the backward pass: sums over the batch, then [group][...], then what is used for one sample. */
typedef struct {
    float *weight, *bias;  /* as in conv_weights */
    float *pooled;         /* before normalisation */
    float *images;         /* with border; all but the first block */
    float *input;          /* [height][width][in_depth]: without border, and where the input is above zero */
    term *by_result;       /* for every result of the convolution, channels: see conv_backward.c */
    term *by_channel;      /* for every channel, patches: see overlap_backward.c */
    int32_t *counts;       /* of terms of every channel, then of every result */
    float *results;        /* [result_height][result_width][out_stride] of one sample */
} conv_gradients;

typedef struct {
    conv_shape shape;
    conv_weights weights;
    conv_activations act;
    conv_gradients grad;
} conv_block;

void plan_conv(conv_block *block, arena *memory, conv_shape shape, int first, int training, int with_offset);
conv_shape shape_conv(int in_channels, int height, int width, int out_channels, int kernel, int padding, int window,
                      int normalised, int first);

/* from and to torch's [out][in][kernel][kernel] and [out]; they return what comes after it */
const float *pack_conv(const conv_block *block, const float *w, float *weight, float *bias);
float *unpack_conv(const conv_block *block, float *w);
void prepare_conv(const conv_block *block); /* once, before the first sample */
void pack_tiles(const conv_block *block);   /* after every change of the weights */

/* the middle of planes [channel][height][width] as the image of a sample */
void load_image(const conv_block *block, const float *planes, int height, int width, int sample);

/* one sample through the block, to[pooled_height][pooled_width][out_stride] with these strides */
void conv_forward(const conv_block *block, int sample, float *to, int to_line, int to_pixel);

/* adds the gradient of the weights, from `grad`, the gradient at the block's output for samples first to end; computes
   that at the block's input, unless it is the first block */
void conv_backward(const conv_block *block, const float *grad, int first, int end, int with_input_grad);
void clear_conv_grad(const conv_block *block); /* before a batch */
void update_conv(const conv_block *block, int overwrite);

static inline float *image_of(const conv_block *block, int sample) {
    return block->act.images + sample % block->shape.cached * block->shape.image_size;
}

/* to the first pixel inside the border */
static inline size_t border_of(const conv_shape *s) { return s->padding * (s->line_stride + s->pixel_stride); }

static inline int32_t *argmax_of(const conv_block *block, int sample) {
    return block->act.argmax + sample % block->shape.cached * block->shape.pooled_size;
}

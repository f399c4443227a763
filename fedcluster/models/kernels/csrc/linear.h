/* A linear layer. Its weights are held transposed, [in][out], rows padded to whole vectors, so that both the forward
   product and the update run along rows. The input of the first layer after blocks of convolution comes as
   [pixel][channel] with padded channels, where torch has [channel][pixel]. */

#pragma once

#include "workspace.h"

typedef struct {
    int in, out;               /* features; `in` counts the padding of channels */
    int in_stride, out_stride; /* floats from one row of inputs or outputs to the next */
    int channels, channel_stride; /* of the input's pixels; 1 and 1 where they are not pixels */
} linear_shape;

typedef struct {
    linear_shape shape;
    float *weight, *bias;               /* [in][out_stride], [out_stride] */
    float *offset, *bias_offset;        /* the same, added in every step; or NULL */
    float *transposed, *zeros;          /* [out][in_stride], [in_stride]: for the backward pass; or NULL */
    float *output, *output_grad;        /* [batch][out_stride] */
} linear_layer;

void plan_linear(linear_layer *layer, arena *memory, linear_shape shape, int batch, int with_input_grad,
                 int with_offset);

/* from and to torch's [out][in] and [out]; they return what comes after it */
const float *pack_linear(const linear_layer *layer, const float *w, float *weight, float *bias);
float *unpack_linear(const linear_layer *layer, float *w);
void prepare_linear(const linear_layer *layer); /* once, before the first backward pass */

void linear_forward(const linear_layer *layer, const float *input, int batch, int with_relu);

/* input_grad = output_grad W^T where the input is above zero, else 0 */
void linear_backward(const linear_layer *layer, const float *output_grad, const float *input, int batch,
                     float *input_grad);
void update_linear(const linear_layer *layer, const float *output_grad, const float *input, int batch, int overwrite);

/* Floats from one row of a layer to the next: whole vectors, and one cache line more where rows would be a large power
   of two apart and compete for the same sets of the cache. */
int spaced(int n);

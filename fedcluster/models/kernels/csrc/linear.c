#include "linear.h"

#include <string.h>

#include "matmul.h"
#include "transpose.h"

int spaced(int n) {
    int row = padded(n);
    return row % 512 ? row : row + 2 * LANES;
}

void plan_linear(linear_layer *layer, arena *memory, linear_shape shape, int batch, int with_input_grad,
                 int with_offset) {
    int64_t weights = (int64_t)shape.in * shape.out_stride;
    *layer = (linear_layer){.shape = shape};
    layer->weight = take(memory, weights);
    layer->bias = take(memory, shape.out_stride);
    layer->output = take(memory, (int64_t)batch * shape.out_stride);
    layer->output_grad = take(memory, (int64_t)batch * shape.out_stride);
    if (with_input_grad) {
        layer->transposed = take(memory, (int64_t)shape.out * shape.in_stride);
        layer->zeros = take(memory, shape.in_stride);
    }
    if (with_offset) {
        layer->offset = take(memory, weights);
        layer->bias_offset = take(memory, shape.out_stride);
    }
}

const float *pack_linear(const linear_layer *layer, const float *w, float *weight, float *bias) {
    linear_shape s = layer->shape;
    int pixels = s.in / s.channel_stride, in = s.channels * pixels;
    if (s.out_stride > s.out || s.channel_stride > s.channels)
        memset(weight, 0, (size_t)s.in * s.out_stride * sizeof(float));
    for (int c = 0; c < s.channels; c++)
        transpose(w + c * pixels, in, s.out, pixels, weight + c * s.out_stride, s.channel_stride * s.out_stride);
    memset(bias, 0, s.out_stride * sizeof(float));
    memcpy(bias, w += (size_t)in * s.out, s.out * sizeof(float));
    return w + s.out;
}

float *unpack_linear(const linear_layer *layer, float *w) {
    linear_shape s = layer->shape;
    int pixels = s.in / s.channel_stride, in = s.channels * pixels;
    for (int c = 0; c < s.channels; c++)
        transpose(layer->weight + c * s.out_stride, s.channel_stride * s.out_stride, pixels, s.out, w + c * pixels, in);
    memcpy(w += (size_t)in * s.out, layer->bias, s.out * sizeof(float));
    return w + s.out;
}

void prepare_linear(const linear_layer *layer) {
    linear_shape s = layer->shape;
    if (!layer->transposed) return;
    memset(layer->zeros, 0, s.in_stride * sizeof(float));
    if (s.in_stride > s.in) memset(layer->transposed, 0, (size_t)s.out * s.in_stride * sizeof(float));
}

void linear_forward(const linear_layer *layer, const float *input, int batch, int with_relu) {
    linear_shape s = layer->shape;
    matmul_bias(input, s.in_stride, batch, s.in, layer->weight, layer->bias, s.out_stride, layer->output, with_relu);
}

void linear_backward(const linear_layer *layer, const float *output_grad, const float *input, int batch,
                     float *input_grad) {
    linear_shape s = layer->shape;
    transpose(layer->weight, s.out_stride, s.in, s.out, layer->transposed, s.in_stride);
    matmul_bias(output_grad, s.out_stride, batch, s.out, layer->transposed, layer->zeros, s.in_stride, input_grad, 0);
    relu_backward(input, input_grad, batch * s.in_stride, input_grad);
}

void update_linear(const linear_layer *layer, const float *output_grad, const float *input, int batch, int overwrite) {
    linear_shape s = layer->shape;
    if (overwrite) {
        memset(layer->weight, 0, (size_t)s.in * s.out_stride * sizeof(float));
        memset(layer->bias, 0, s.out_stride * sizeof(float));
    }
    add_outer_products(input, s.in_stride, batch, s.in, output_grad, s.out_stride, layer->weight, layer->offset);
    for (int j = 0; j < s.out_stride; j += LANES) {
        vector sum = layer->bias_offset ? load(layer->bias_offset + j) : broadcast(0);
        for (int i = 0; i < batch; i++) sum += load(output_grad + i * s.out_stride + j);
        store(layer->bias + j, load(layer->bias + j) + sum);
    }
}

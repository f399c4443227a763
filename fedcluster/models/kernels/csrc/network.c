/* A network of blocks and linear layers: its plan, its forward and its backward pass. */

#include "network.h"

#include <string.h>

#include "simd.h"

enum { GROUP = 4 }; /* samples whose images fit the second cache of a core */

int64_t build_network(network *net, const network_spec *spec, int batch, int training, int with_offset,
                      float *workspace) {
    arena memory = {workspace, 0};
    int blocks = spec->conv_blocks, channels = spec->channels, height = spec->height, width = spec->width;
    net->conv_blocks = blocks, net->linear_layers = spec->linear_layers;
    net->height = height, net->width = width;
    net->input_size = blocks ? channels * height * width : spec->sizes[0];
    net->labels = take(&memory, 2 * batch);
    if (spec->crop) height = min(height, spec->crop), width = min(width, spec->crop);
    net->group_size = 1; /* without lists of terms, one sample at a time */
    for (int i = 1; i < blocks; i++)
        if (spec->window[i] == 3) net->group_size = GROUP;
    int features = spec->sizes[0];
    for (int i = 0; i < blocks; i++) {
        conv_shape shape = shape_conv(channels, height, width, spec->out_channels[i], spec->kernel[i], spec->padding[i],
                                      spec->window[i], spec->normalised[i], !i);
        shape.cached = training ? batch : 1, shape.group = net->group_size;
        plan_conv(&net->conv[i], &memory, shape, !i, training, with_offset);
        channels = shape.out_channels, height = shape.pooled_height, width = shape.pooled_width;
        features = shape.pooled_size;
    }
    net->sample = blocks ? take(&memory, net->input_size) : 0;
    net->features = take(&memory, (int64_t)batch * features);
    net->features_grad = blocks ? take(&memory, (int64_t)batch * features) : 0;
    for (int i = 0; i < net->linear_layers; i++) {
        int in = i ? spec->sizes[i] : features, out = spec->sizes[i + 1];
        linear_shape shape = {.in = in, .out = out, .in_stride = i ? spaced(in) : in, .out_stride = spaced(out)};
        shape.channels = i || !blocks ? 1 : channels, shape.channel_stride = i || !blocks ? 1 : padded(channels);
        plan_linear(&net->linear[i], &memory, shape, batch, i || blocks, with_offset);
    }
    return memory.used;
}

void pack_weights(const network *net, const float *w, const float *step_offset) {
    for (const conv_block *block = net->conv; block < net->conv + net->conv_blocks; block++) {
        const conv_weights *to = &block->weights;
        w = pack_conv(block, w, to->weight, to->bias);
        if (step_offset) step_offset = pack_conv(block, step_offset, to->offset, to->bias_offset);
        prepare_conv(block);
    }
    for (const linear_layer *layer = net->linear; layer < net->linear + net->linear_layers; layer++) {
        w = pack_linear(layer, w, layer->weight, layer->bias);
        if (step_offset) step_offset = pack_linear(layer, step_offset, layer->offset, layer->bias_offset);
        prepare_linear(layer);
    }
}

void unpack_weights(const network *net, float *w) {
    for (int i = 0; i < net->conv_blocks; i++) w = unpack_conv(&net->conv[i], w);
    for (int i = 0; i < net->linear_layers; i++) w = unpack_linear(&net->linear[i], w);
}

/* One sample and its label out of the data set, by its row; the sample that is `prefetch` rows later in the list is
   fetched into the cache. */
static void gather(const dataset *data, const int64_t *row, int prefetch, int n, float *restrict x, int64_t *y) {
    int64_t size = n * (data->is_bytes ? 1 : (int64_t)sizeof(float));
    const char *from = (const char *)data->x + *row * size, *next = (const char *)data->x + row[prefetch] * size;
    *y = data->y[*row];
    for (int64_t j = 0; prefetch && j < size; j += 64) __builtin_prefetch(next + j, 0, 2);
    if (!data->is_bytes) {
        memcpy(x, from, size);
        return;
    }
    int plane = n / data->channels;
    for (int c = 0; c < data->channels; c++) {
        float scale = data->scale[c], shift = data->shift[c];
        for (int j = c * plane; j < (c + 1) * plane; j++) x[j] = ((const uint8_t *)from)[j] * scale + shift;
    }
}

const float *forward(const network *net, const dataset *data, const int64_t *rows, int batch, int prefetch) {
    int blocks = net->conv_blocks, features = net->linear[0].shape.in;
    for (int i = 0; i < batch; i++) {
        float *to = net->features + (size_t)i * features;
        gather(data, rows + i, prefetch, net->input_size, blocks ? net->sample : to, net->labels + i);
        if (blocks) load_image(net->conv, net->sample, net->height, net->width, i);
        for (const conv_block *block = net->conv; block < net->conv + blocks; block++) {
            const conv_shape *s = &block->shape, *next = &block[1].shape;
            if (block + 1 < net->conv + blocks)
                conv_forward(block, i, image_of(block + 1, i) + border_of(next), next->line_stride, next->pixel_stride);
            else
                conv_forward(block, i, to, s->pooled_width * s->out_stride, s->out_stride);
        }
    }
    const float *x = net->features;
    for (int l = 0; l < net->linear_layers; x = net->linear[l++].output)
        linear_forward(&net->linear[l], x, batch, l < net->linear_layers - 1);
    return x;
}

void backward_and_update(const network *net, int batch, int overwrite) {
    const linear_layer *last = net->linear + net->linear_layers - 1;
    for (const linear_layer *layer = last; layer >= net->linear; layer--) {
        int first = layer == net->linear;
        const float *grad = layer == last ? layer->output : layer->output_grad;
        const float *input = first ? net->features : layer[-1].output;
        if (layer->transposed)
            linear_backward(layer, grad, input, batch, first ? net->features_grad : layer[-1].output_grad);
        update_linear(layer, grad, input, batch, overwrite);
    }
    int blocks = net->conv_blocks;
    for (int i = 0; i < blocks; i++) clear_conv_grad(&net->conv[i]);
    for (int start = 0; blocks && start < batch; start += net->group_size) {
        const float *grad = net->features_grad + start * net->conv[blocks - 1].shape.pooled_size;
        for (int i = blocks - 1; i >= 0; grad = net->conv[i--].grad.input)
            conv_backward(&net->conv[i], grad, start, min(batch, start + net->group_size), i > 0);
    }
    for (int i = 0; i < blocks; i++) update_conv(&net->conv[i], overwrite);
}

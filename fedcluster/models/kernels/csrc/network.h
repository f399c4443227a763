/* What a network is inside the engine: geometry, weights in the engine's own layout, and memory to work in. All arrays
   lie in the workspace that the caller provides; `build_network` hands them out. */

#pragma once

#include "conv.h"
#include "engine.h"
#include "linear.h"

typedef struct {
    int conv_blocks, linear_layers;
    int input_size, height, width; /* numbers of a sample; its size if it is an image, before it is cropped */
    int group_size;                /* samples that go through the backward pass of the blocks together */
    conv_block conv[MAX_LAYERS];
    linear_layer linear[MAX_LAYERS];
    float *sample;        /* [input_size] one sample, as it is before the first block */
    float *features;      /* [batch][...] the input of the first linear layer */
    float *features_grad; /* the same, of the gradient; with blocks only */
    int64_t *labels;      /* [batch] */
} network;

/* Plans a network for batches of this size and hands out the workspace; returns how many floats that takes. With
   workspace = NULL it only counts. */
int64_t build_network(network *net, const network_spec *spec, int batch, int training, int with_offset,
                      float *workspace);

/* weights (and the step offset, if there is one) from vectors in torch's layout, and back */
void pack_weights(const network *net, const float *w, const float *step_offset);
void unpack_weights(const network *net, float *w);

/* the scores of a batch, [batch][out_stride of the last layer]; the samples `prefetch` rows later are fetched into
   the cache meanwhile (0: none) */
const float *forward(const network *net, const dataset *data, const int64_t *rows, int batch, int prefetch);

/* weights += their gradient times what the gradient at the scores has been scaled with, + step offset; with `overwrite`
   that sum replaces the weights */
void backward_and_update(const network *net, int batch, int overwrite);

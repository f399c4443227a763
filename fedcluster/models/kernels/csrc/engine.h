/* The interface of the library. Python mirrors the two structures in structures.py and compares their layout with
   `structure_layout` when it loads the library. */

#pragma once

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_LAYERS = 16, MAX_KERNEL = 5 };
enum { OK, ROW_OUT_OF_RANGE, LABEL_OUT_OF_RANGE };

/* A network: blocks of convolution (`conv_blocks` may be 0), then linear layers with ReLU between them. The blocks take
   images [channels][height][width], cropped to their middle if they are larger than `crop` (0: never). */
typedef struct {
    int linear_layers, sizes[MAX_LAYERS + 1]; /* features before the first layer and after each */
    int conv_blocks, out_channels[MAX_LAYERS];
    int kernel[MAX_LAYERS], padding[MAX_LAYERS];    /* 3 or 5; 0 to kernel / 2 */
    int window[MAX_LAYERS], normalised[MAX_LAYERS]; /* of max-pooling with stride 2: 2, or 3 ("same") */
    int channels, height, width, crop;
} network_spec;

/* Samples and labels. Bytes become x * scale + shift by channel; floats are taken as they are. */
typedef struct {
    const void *x;    /* [samples][...] float or uint8_t */
    const int64_t *y; /* [samples] */
    const float *scale, *shift; /* [channels], for bytes */
    int64_t samples;
    int is_bytes, channels;
} dataset;

/* w is the vector of all parameters in torch's order: of each layer its weight [out][in]([kernel][kernel]), then its
   bias [out]. `rows` are indices of samples. `workspace` has as many floats as `workspace_size` says. All functions
   check rows and labels before they use them, and return OK or what is wrong; then nothing has been changed. */

EXPORT int64_t workspace_size(const network_spec *spec, int batch, int training, int with_offset);

/* w <- w - lr grad f(w; batch) + step_offset, for every batch in rows[steps][batch]; step_offset may be NULL */
EXPORT int sgd(float *w, const float *step_offset, const network_spec *spec, const dataset *data, const int64_t *rows,
               int steps, int batch, float lr, float *workspace);

/* gradient = grad f(w; batch), f the mean cross-entropy of the batch rows[batch] */
EXPORT int compute_gradient(const float *w, float *gradient, const network_spec *spec, const dataset *data,
                            const int64_t *rows, int batch, float *workspace);

/* the summed cross-entropy and the number of correct predictions of every `batch` of n rows; the last may be smaller */
EXPORT int evaluate(const float *w, const network_spec *spec, const dataset *data, const int64_t *rows, int64_t n,
                    int batch, double *losses, int64_t *correct, float *workspace);

/* sizeof and offsets of all fields of network_spec, then of dataset; returns how many numbers there are */
EXPORT int structure_layout(int64_t *layout);

/* Passes over one vector, for the server; see vectors.c. */
EXPORT int all_finite(const float *v, int64_t n);
EXPORT double sum_of_squares(const float *restrict v, const float *restrict origin, int64_t n);
EXPORT void add_rounded(double *restrict total, const float *restrict v, int64_t n, double weight, double grid);

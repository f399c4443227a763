/* The functions that Python calls. */

#include "engine.h"

#include <math.h>
#include <stddef.h>

#include "network.h"

int64_t workspace_size(const network_spec *spec, int batch, int training, int with_offset) {
    network net;
    return build_network(&net, spec, batch, training, with_offset, 0);
}

static int check(const network_spec *spec, const dataset *data, const int64_t *rows, int64_t n) {
    int64_t classes = spec->sizes[spec->linear_layers];
    for (int64_t i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] >= data->samples) return ROW_OUT_OF_RANGE;
        if (data->y[rows[i]] < 0 || data->y[rows[i]] >= classes) return LABEL_OUT_OF_RANGE;
    }
    return OK;
}

/* the last layer's scores -> -lr times the gradient of the mean cross-entropy at them */
static void loss_gradient(const network *net, int batch, float lr) {
    const linear_layer *last = &net->linear[net->linear_layers - 1];
    int classes = last->shape.out, row = last->shape.out_stride;
    for (int i = 0; i < batch; i++) {
        float *s = last->output + i * row, high = s[0], sum = 0;
        for (int c = 1; c < classes; c++) high = s[c] > high ? s[c] : high;
        for (int c = 0; c < classes; c++) sum += s[c] = expf(s[c] - high);
        for (int c = 0; c < classes; c++) s[c] = -lr / batch * (s[c] / sum - (c == net->labels[i]));
        for (int c = classes; c < row; c++) s[c] = 0;
    }
}

int sgd(float *w, const float *step_offset, const network_spec *spec, const dataset *data, const int64_t *rows,
        int steps, int batch, float lr, float *workspace) {
    int status = check(spec, data, rows, (int64_t)steps * batch);
    if (status != OK) return status;
    network net;
    build_network(&net, spec, batch, 1, step_offset != 0, workspace);
    pack_weights(&net, w, step_offset);
    for (int t = 0; t < steps; t++, rows += batch) {
        forward(&net, data, rows, batch, t + 1 < steps ? batch : 0);
        loss_gradient(&net, batch, lr);
        backward_and_update(&net, batch, 0);
    }
    unpack_weights(&net, w);
    return OK;
}

/* A step of rate -1 that replaces the weights is the gradient. */
int compute_gradient(const float *w, float *gradient, const network_spec *spec, const dataset *data,
                     const int64_t *rows, int batch, float *workspace) {
    int status = check(spec, data, rows, batch);
    if (status != OK) return status;
    network net;
    build_network(&net, spec, batch, 1, 0, workspace);
    pack_weights(&net, w, 0);
    forward(&net, data, rows, batch, 0);
    loss_gradient(&net, batch, -1);
    backward_and_update(&net, batch, 1);
    unpack_weights(&net, gradient);
    return OK;
}

int evaluate(const float *w, const network_spec *spec, const dataset *data, const int64_t *rows, int64_t n, int batch,
             double *losses, int64_t *correct, float *workspace) {
    int status = check(spec, data, rows, n);
    if (status != OK) return status;
    network net;
    build_network(&net, spec, batch, 0, 0, workspace);
    pack_weights(&net, w, 0);
    const linear_shape *last = &net.linear[net.linear_layers - 1].shape;
    for (; n > 0; n -= batch, rows += batch, losses++, correct++) {
        int here = n < batch ? n : batch;
        const float *s = forward(&net, data, rows, here, 0);
        *losses = 0, *correct = 0;
        for (int i = 0; i < here; i++, s += last->out_stride) {
            int best = 0;
            float sum = 0;
            for (int c = 1; c < last->out; c++) best = s[c] > s[best] ? c : best;
            for (int c = 0; c < last->out; c++) sum += expf(s[c] - s[best]);
            *losses += logf(sum) + s[best] - s[net.labels[i]];
            *correct += best == net.labels[i];
        }
    }
    return OK;
}

int structure_layout(int64_t *layout) {
    const int64_t found[] = {
        sizeof(network_spec),
        offsetof(network_spec, linear_layers),
        offsetof(network_spec, sizes),
        offsetof(network_spec, conv_blocks),
        offsetof(network_spec, out_channels),
        offsetof(network_spec, kernel),
        offsetof(network_spec, padding),
        offsetof(network_spec, window),
        offsetof(network_spec, normalised),
        offsetof(network_spec, channels),
        offsetof(network_spec, height),
        offsetof(network_spec, width),
        offsetof(network_spec, crop),
        sizeof(dataset),
        offsetof(dataset, x),
        offsetof(dataset, y),
        offsetof(dataset, scale),
        offsetof(dataset, shift),
        offsetof(dataset, samples),
        offsetof(dataset, is_bytes),
        offsetof(dataset, channels),
    };
    enum { COUNT = sizeof found / sizeof *found };
    for (int i = 0; i < COUNT; i++) layout[i] = found[i];
    return COUNT;
}

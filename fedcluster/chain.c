/* E steps of plain SGD on a chain of linear layers with ReLU between them and the mean cross-entropy at its end, blocks
   of convolution before it or not; the evaluation of such a network; and the two passes that the server makes over an
   update.

   A step of a small network is a few products of thin matrices. Here they are written for the caches of one core:
   weights are held transposed, [in][out], rows padded to whole vectors, so that both the forward product and the
   update run along rows; an update adds the sum over the batch to the weights in one pass; nothing is allocated and
   nothing is called between steps.

   Every sum is formed on its own before it is added to a weight, in the order of the batch. One thread. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "conv.h"
#include "tiles.h"

enum { MOST = 16 };

/* layers of these widths, the first of which is a sample's; or that of the blocks before them, which make this many
   maps each out of pictures */
typedef struct {
    int layers, sizes[MOST + 1];
    int blocks, maps[MOST], channels, height, width;
} form;

/* ReLU's derivative: zero where the layer's output is */
static void mask_by(const float *output, const float *gradient, int n, float *to) {
    for (int i = 0; i < n; i++) to[i] = output[i] <= 0 ? 0 : gradient[i];
}

/* scores -> -lr / batch times the gradient of the mean cross-entropy at them */
static void slope(float *scores, int row, int classes, int batch, const int64_t *y, float lr) {
    for (int i = 0; i < batch; i++) {
        float *s = scores + i * row, high = s[0], sum = 0;
        for (int c = 1; c < classes; c++) high = s[c] > high ? s[c] : high;
        for (int c = 0; c < classes; c++) sum += s[c] = expf(s[c] - high);
        for (int c = 0; c < classes; c++) s[c] = -lr / batch * (s[c] / sum - (c == y[i]));
        for (int c = classes; c < row; c++) s[c] = 0;
    }
}

/* where samples are, and what a model sees of them: bytes as value * scale + shift by channel, floats as they are */
typedef struct {
    const void *x;
    const int64_t *y;
    const float *scale, *shift;
    int bytes, channels;
} samples;

/* one sample out of the data set, by its row; the one that is `ahead` in the list of rows is called for meanwhile */
static void gather(const samples *from, const int64_t *row, int ahead, int n, float *restrict x, int64_t *y) {
    int64_t size = n * (from->bytes ? 1 : (int64_t)sizeof(float));
    const char *here = (const char *)from->x + *row * size, *next = (const char *)from->x + row[ahead] * size;
    *y = from->y[*row];
    for (int64_t j = 0; ahead && j < size; j += 64) __builtin_prefetch(next + j, 0, 2);
    if (!from->bytes) {
        memcpy(x, here, size);
        return;
    }
    int plane = n / from->channels;
    for (int c = 0; c < from->channels; c++) {
        float scale = from->scale[c], shift = from->shift[c];
        for (int j = c * plane; j < (c + 1) * plane; j++) x[j] = ((const uint8_t *)here)[j] * scale + shift;
    }
}

/* one layer, its weights transposed, with room for all that a step needs of it. Its inputs may come in maps: w has
   them one after the other, here they are side by side, padded. */
typedef struct {
    int in, out, in_row, out_row, maps, maps_row;
    float *weight, *bias, *output, *gradient, *turned, *zeros, *drift, *bias_drift;
} layer;

typedef struct {
    int blocks, layers, input; /* numbers of a sample */
    int alone;                 /* a step begins by forgetting the weights, so that it leaves itself in their place */
    block block[MOST];
    layer layer[MOST];
    float *sample, *features, *gradient; /* a sample as it comes; what goes into the layers, and the gradient at it */
    int64_t *labels;
} network;

/* lays a network out in scratch memory, if there is any; returns how many floats it takes */
static int64_t lay_out(network *net, const form *form, int batch, int learning, int drifting, float *room) {
    int64_t used = 0;
#define TAKE(place, n) (place = room ? (void *)(room + used) : 0, used += ((int64_t)(n) + 15) / 16 * 16)
    net->blocks = form->blocks, net->layers = form->layers, net->alone = 0;
    net->input = form->blocks ? form->channels * form->height * form->width : form->sizes[0];
    TAKE(net->labels, 2 * batch);
    int in = form->channels, height = form->height, width = form->width;
    for (int l = 0; l < net->blocks; l++, height /= 2, width /= 2) {
        block *one = &net->block[l];
        *one = (block){.in = in, .out = form->maps[l], .height = height, .width = width};
        in = one->out;
        one->in_row = l ? padded(one->in) : one->in, one->out_row = padded(one->out);
        one->run = padded(3 * one->in_row), one->line = (width + 2) * one->in_row;
        one->high = height / 2, one->wide = width / 2;
        one->picture = (size_t)(height + 2) * one->line, one->cells = (size_t)one->high * one->wide * one->out_row;
        one->kept = learning ? batch : 1;
        int64_t weights = (int64_t)one->out_row * 3 * one->run;
        TAKE(one->weight, weights);
        TAKE(one->bias, one->out_row);
        TAKE(one->turned, 9 * one->in_row * one->out_row);
        TAKE(one->pictures, one->kept * one->picture + one->run); /* a whole vector may be read at the last patch */
        TAKE(one->chosen, one->kept * one->cells);
        TAKE(one->results, 4 * one->wide * one->out_row);
        if (learning) {
            TAKE(one->change, weights);
            TAKE(one->bias_change, one->out_row);
            TAKE(one->gradient, one->picture);
            TAKE(one->below, one->picture);
            TAKE(one->amounts, 4 * one->out_row);
            TAKE(one->origins, 4 * one->out_row);
        }
        if (drifting) {
            TAKE(one->drift, weights);
            TAKE(one->bias_drift, one->out_row);
        }
    }
    int features = net->blocks ? (int)net->block[net->blocks - 1].cells : form->sizes[0];
    if (net->blocks) TAKE(net->sample, net->input);
    TAKE(net->features, (int64_t)batch * features);
    if (net->blocks) TAKE(net->gradient, (int64_t)batch * features);
    for (int l = 0; l < net->layers; l++) {
        layer *one = &net->layer[l];
        *one = (layer){.in = l ? form->sizes[l] : features, .out = form->sizes[l + 1], .maps = 1, .maps_row = 1};
        if (!l && net->blocks) one->maps = in, one->maps_row = padded(in);
        one->out_row = padded(one->out), one->in_row = l ? padded(one->in) : one->in;
        TAKE(one->weight, (int64_t)one->in * one->out_row);
        TAKE(one->bias, one->out_row);
        TAKE(one->output, batch * one->out_row);
        TAKE(one->gradient, batch * one->out_row);
        if (l || net->blocks) {
            TAKE(one->turned, (int64_t)one->out * one->in_row);
            TAKE(one->zeros, one->in_row);
        }
        if (drifting) {
            TAKE(one->drift, (int64_t)one->in * one->out_row);
            TAKE(one->bias_drift, one->out_row);
        }
    }
#undef TAKE
    return used;
}

/* floats of scratch memory that `descend` needs; `score`, which does not learn, needs less */
int64_t scratch(const form *form, int batch, int learning, int drifting) {
    network net;
    return lay_out(&net, form, batch, learning, drifting, 0);
}

/* weights [out][in] and biases [out] into a layer's form, zero where rows are padded; returns what comes after them */
static const float *read_layer(const layer *one, const float *w, float *weight, float *bias) {
    int each = one->in / one->maps_row, in = one->maps * each;
    if (one->out_row > one->out || one->maps_row > one->maps)
        memset(weight, 0, (size_t)one->in * one->out_row * sizeof(float));
    for (int m = 0; m < one->maps; m++)
        flip(w + m * each, in, one->out, each, weight + m * one->out_row, one->maps_row * one->out_row);
    memset(bias, 0, one->out_row * sizeof(float));
    memcpy(bias, w += (size_t)in * one->out, one->out * sizeof(float));
    return w + one->out;
}

static float *write_layer(const layer *one, float *w) {
    int each = one->in / one->maps_row, in = one->maps * each;
    for (int m = 0; m < one->maps; m++)
        flip(one->weight + m * one->out_row, one->maps_row * one->out_row, each, one->out, w + m * each, in);
    memcpy(w += (size_t)in * one->out, one->bias, one->out * sizeof(float));
    return w + one->out;
}

/* the network out of w, its blocks and layers from first to last, and out of what is of its form */
static void read_in(const network *net, const float *w, const float *drift) {
    for (const block *one = net->block; one < net->block + net->blocks; one++) {
        w = read_block(one, w, one->weight, one->bias);
        if (drift) drift = read_block(one, drift, one->drift, one->bias_drift);
        memset(one->pictures, 0, (one->kept * one->picture + one->run) * sizeof(float)); /* borders stay so */
        turn(one);
    }
    for (const layer *one = net->layer; one < net->layer + net->layers; one++) {
        w = read_layer(one, w, one->weight, one->bias);
        if (drift) drift = read_layer(one, drift, one->drift, one->bias_drift);
        if (!one->turned) continue;
        memset(one->zeros, 0, one->in_row * sizeof(float));
        if (one->in_row > one->in) memset(one->turned, 0, (size_t)one->out * one->in_row * sizeof(float));
    }
}

/* the last layer's output for a batch of the rows */
static const float *scores_of(const network *net, const samples *from, const int64_t *rows, int batch, int ahead) {
    const block *last = net->block + net->blocks;
    const float *x = net->features;
    int features = net->layer[0].in;
    for (int i = 0; i < batch; i++) {
        float *to = net->features + (size_t)i * features;
        gather(from, rows + i, ahead, net->input, net->blocks ? net->sample : to, net->labels + i);
        if (net->blocks) frame(net->block, net->sample, picture_of(net->block, i));
        for (const block *one = net->block; one < last; one++)
            if (one + 1 < last)
                pass(one, i, picture_of(one + 1, i) + one[1].line + one[1].in_row, one[1].line);
            else
                pass(one, i, to, one->wide * one->out_row);
    }
    for (int l = 0; l < net->layers; x = net->layer[l++].output) {
        const layer *one = &net->layer[l];
        forward(x, one->in_row, batch, one->in, one->weight, one->bias, one->out, one->output, l < net->layers - 1);
    }
    return x;
}

/* a step of the layers, from the gradient at the last one's output */
static void descend_layers(const network *net, int batch) {
    const layer *last = net->layer + net->layers - 1;
    for (const layer *one = last; one >= net->layer; one--) {
        const float *d = one == last ? one->output : one->gradient;
        const float *below = one == net->layer ? net->features : one[-1].output;
        if (one->turned) {
            float *gradient = one == net->layer ? net->gradient : one[-1].gradient;
            flip(one->weight, one->out_row, one->in, one->out, one->turned, one->in_row);
            forward(d, one->out_row, batch, one->out, one->turned, one->zeros, one->in, gradient, 0);
            mask_by(below, gradient, batch * one->in_row, gradient);
        }
        if (net->alone) {
            memset(one->weight, 0, (size_t)one->in * one->out_row * sizeof(float));
            memset(one->bias, 0, one->out_row * sizeof(float));
        }
        update(below, one->in_row, batch, one->in, d, one->out, one->weight, one->drift);
        for (int j = 0; j < one->out_row; j += LANES) {
            vector sum = one->bias_drift ? load(one->bias_drift + j) : all(0);
            for (int i = 0; i < batch; i++) sum += load(d + i * one->out_row + j);
            store(one->bias + j, load(one->bias + j) + sum);
        }
    }
}

/* a step of the blocks, from the gradient at what they make, sample by sample */
static void descend_blocks(const network *net, int batch) {
    const block *last = net->block + net->blocks - 1;
    for (const block *one = net->block; one <= last; one++) {
        memset(one->change, 0, (size_t)one->out_row * 3 * one->run * sizeof(float));
        memset(one->bias_change, 0, one->out_row * sizeof(float));
    }
    for (int i = 0; i < batch; i++) {
        const float *g = net->gradient + i * last->cells;
        for (const block *one = last; one > net->block; one--) {
            learn(one, i, g);
            pass_back(one, i, g);
            for (int y = 0; y < one->height; y++) {
                size_t at = (y + 1) * one->line + one->in_row, n = one->width * one->in_row;
                mask_by(picture_of(one, i) + at, one->gradient + at, n, one->below + y * n);
            }
            g = one->below;
        }
        learn(net->block, i, g);
    }
    for (const block *one = net->block; one <= last; one++) {
        if (net->alone) {
            memset(one->weight, 0, (size_t)one->out_row * 3 * one->run * sizeof(float));
            memset(one->bias, 0, one->out_row * sizeof(float));
        }
        step_block(one);
        turn(one);
    }
}

/* one step on a batch of the rows */
static void step(const network *net, const samples *from, const int64_t *rows, int batch, int ahead, float lr) {
    const layer *last = &net->layer[net->layers - 1];
    scores_of(net, from, rows, batch, ahead);
    slope(last->output, last->out_row, last->out, batch, net->labels, lr);
    descend_layers(net, batch);
    if (net->blocks) descend_blocks(net, batch);
}

static void write_out(const network *net, float *w) {
    for (const block *one = net->block; one < net->block + net->blocks; one++) w = write_block(one, w);
    for (const layer *one = net->layer; one < net->layer + net->layers; one++) w = write_layer(one, w);
}

/* E steps: rows is [steps][batch], places in the data set; drift, of the form of w or null, is added to w after each */
void descend(float *w, const float *drift, const form *form, const samples *from, const int64_t *rows, int steps,
             int batch, float lr, float *room) {
    network net;
    lay_out(&net, form, batch, 1, drift != 0, room);
    read_in(&net, w, drift);
    for (int t = 0; t < steps; t++, rows += batch) step(&net, from, rows, batch, t + 1 < steps ? batch : 0, lr);
    write_out(&net, w);
}

/* the gradient at w of the mean cross-entropy of one batch: a step of rate -1, without the weights that it is from */
void gradient(const float *w, float *g, const form *form, const samples *from, const int64_t *rows, int batch,
              float *room) {
    network net;
    lay_out(&net, form, batch, 1, 0, room);
    read_in(&net, w, 0);
    net.alone = 1;
    step(&net, from, rows, batch, 0, -1);
    write_out(&net, g);
}

/* of every batch (the last may be smaller) of n rows: the summed cross-entropy, and how many scores are right */
void score(const float *w, const form *form, const samples *from, const int64_t *rows, int64_t n, int batch,
           double *losses, int64_t *right, float *room) {
    network net;
    lay_out(&net, form, batch, 0, 0, room);
    read_in(&net, w, 0);
    int classes = form->sizes[form->layers], row = padded(classes);
    for (; n > 0; n -= batch, rows += batch, losses++, right++) {
        int here = n < batch ? n : batch;
        const float *s = scores_of(&net, from, rows, here, 0);
        *losses = 0, *right = 0;
        for (int i = 0; i < here; i++, s += row) {
            int best = 0;
            float sum = 0;
            for (int c = 1; c < classes; c++) best = s[c] > s[best] ? c : best;
            for (int c = 0; c < classes; c++) sum += expf(s[c] - s[best]);
            *losses += logf(sum) + s[best] - s[net.labels[i]];
            *right += best == net.labels[i];
        }
    }
}

/* whether nothing is NaN or infinite: those have every bit of the exponent set */
int all_finite(const float *v, int64_t n) {
    uint32_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, v + i, sizeof bits);
        found |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !found;
}

/* total += weight * v, each term rounded to a multiple of what is left of it beside `grid`: see aggregate.py */
void accumulate(double *restrict total, const float *restrict v, int64_t n, double weight, double grid) {
    for (int64_t i = 0; i < n; i++) total[i] += (grid + weight * v[i]) - grid;
}

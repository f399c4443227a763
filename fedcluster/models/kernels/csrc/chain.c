/* E steps of plain SGD on a chain of linear layers with ReLU between them and the mean cross-entropy at its end, blocks
   of convolution before it or not (conv.h, pool.h, normalise.h and back.h); the evaluation of such a network; and the
   two passes that the server makes over an update.

   A step of a small network is a few products of thin matrices. Here they are written for the caches of one core:
   weights are held transposed, [in][out], rows padded to whole vectors, so that both the forward product and the
   update run along rows; an update adds the sum over the batch to the weights in one pass; nothing is allocated and
   nothing is called between steps.

   Every sum is formed on its own before it is added to a weight, in the order of the batch. One thread. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "back.h"

enum { MOST = 16, GROUP = 4 }; /* layers and blocks; samples, whose pictures a core's own cache has room for */

/* layers of these widths, the first of which is a sample's; or that of the blocks before them, which make this many
   maps each out of pictures, or of their middle if they are larger than `crop` */
typedef struct {
    int layers, sizes[MOST + 1];
    int blocks, maps[MOST], kernels[MOST], windows[MOST], normalised[MOST];
    int channels, height, width, crop;
} form;

/* ReLU's derivative: zero where the layer's output is; n is one of whole vectors */
static void mask_by(const float *output, const float *gradient, int n, float *to) {
    for (int i = 0; i < n; i += LANES) store(to + i, (vector)((mask)load(gradient + i) & ~(load(output + i) <= 0)));
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
    int blocks, layers, input, height, width, group; /* numbers of a sample; its size, if it is a picture */
    int alone; /* a step begins by forgetting the weights, so that it leaves itself in their place */
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
    net->height = form->height, net->width = form->width;
    int in = form->channels, height = form->height, width = form->width;
    if (form->crop && height > form->crop) height = form->crop;
    if (form->crop && width > form->crop) width = form->crop;
    net->group = 1; /* where there are no lists, one sample at a time */
    for (int l = 1; l < net->blocks; l++)
        if (form->windows[l] == 3) net->group = GROUP;
    for (int l = 0; l < net->blocks; l++) {
        block *one = &net->block[l];
        *one = (block){.in = in, .out = form->maps[l], .height = height, .width = width, .kernel = form->kernels[l]};
        one->window = form->windows[l], one->normalised = form->normalised[l], one->kept = learning ? batch : 1;
        one->depth = l ? padded(in) : in, one->out_row = padded(one->out);
        place_patches(one);
        place_windows(one);
        in = one->out, height = one->high, width = one->wide;
        int64_t weights = (int64_t)one->out_row * one->kernel * one->run, kept = one->kept * one->cells;
        TAKE(one->weight, weights);
        TAKE(one->bias, one->out_row);
        TAKE(one->turned, one->kernel * one->parts * one->part * one->out_row);
        TAKE(one->pictures, one->kept * one->picture + one->run); /* a whole vector may be read at the last patch */
        TAKE(one->chosen, kept);
        TAKE(one->results, one->window * one->across * one->out_row);
        if (one->normalised) {
            TAKE(one->pooled, kept);
            TAKE(one->sums, kept);
            TAKE(one->margin, one->wide * margin_of(one));
        }
        if (learning) {
            TAKE(one->change, weights);
            TAKE(one->bias_change, one->out_row);
        }
        one->group = net->group;
        if (learning && one->normalised) TAKE(one->inner, one->group * one->cells);
        if (learning && l) {
            TAKE(one->gradient, one->group * one->picture);
            TAKE(one->below, (int64_t)one->group * one->height * one->width * one->depth);
            TAKE(one->by_result, 2 * (one->window == 2 ? 4 * (size_t)one->out_row : one->group * (one->cells + 1)));
        }
        if (learning && l && one->window == 3) {
            TAKE(one->by_channel, 2 * one->group * (one->cells + one->out_row));
            TAKE(one->counts, one->group * (one->out_row + one->height * one->width));
            TAKE(one->spread, (int64_t)one->height * one->width * one->out_row);
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
        one->out_row = spaced(one->out), one->in_row = l ? spaced(one->in) : one->in;
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
        if (one->normalised) memset(one->margin, 0, one->wide * margin_of(one) * sizeof(float));
        if (one->spread) memset(one->spread, 0, (size_t)one->height * one->width * one->out_row * sizeof(float));
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
        if (net->blocks) frame(net->block, net->sample, net->height, net->width, picture_of(net->block, i));
        for (const block *one = net->block; one < last; one++)
            if (one + 1 < last)
                pass(one, i, middle_of(one + 1, i), one[1].line, one[1].in_row);
            else
                pass(one, i, to, one->wide * one->out_row, one->out_row);
    }
    for (int l = 0; l < net->layers; x = net->layer[l++].output) {
        const layer *one = &net->layer[l];
        forward(x, one->in_row, batch, one->in, one->weight, one->bias, one->out_row, one->output, l < net->layers - 1);
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
            forward(d, one->out_row, batch, one->out, one->turned, one->zeros, one->in_row, gradient, 0);
            mask_by(below, gradient, batch * one->in_row, gradient);
        }
        if (net->alone) {
            memset(one->weight, 0, (size_t)one->in * one->out_row * sizeof(float));
            memset(one->bias, 0, one->out_row * sizeof(float));
        }
        update(below, one->in_row, batch, one->in, d, one->out_row, one->weight, one->drift);
        for (int j = 0; j < one->out_row; j += LANES) {
            vector sum = one->bias_drift ? load(one->bias_drift + j) : all(0);
            for (int i = 0; i < batch; i++) sum += load(d + i * one->out_row + j);
            store(one->bias + j, load(one->bias + j) + sum);
        }
    }
}

/* the gradient at a picture, without its border */
static void unframe(const block *one, int sample, float *to) {
    int apart = one->parts > 1, n = apart ? one->depth : one->width * one->depth;
    const float *output = middle_of(one, sample), *gradient = gradient_of(one, sample) + border_of(one);
    for (int y = 0; y < one->height; y++)
        for (int x = 0; x < (apart ? one->width : 1); x++, to += n) {
            size_t at = y * one->line + x * one->in_row;
            mask_by(output + at, gradient + at, n, to);
        }
}

/* what a group of samples would have the blocks learn, from the gradient at what they make of them. It is zero where
   that is not above zero: ReLU's derivative, which normalisation leaves as it is. */
static void learn_from(const network *net, int first, int end) {
    const float *g = net->gradient + first * net->block[net->blocks - 1].cells;
    for (const block *one = net->block + net->blocks - 1;; g = one->below, one--) {
        if (one->normalised) {
            for (int i = first; i < end; i++)
                normalise_back(one, i, g + (i - first) * one->cells, one->inner + (i - first) * one->cells);
            g = one->inner;
        }
        learn_bias(one, g, (end - first) * one->cells);
        int sorted = one > net->block && one->window == 3;
        for (int i = first; i < end; i++) {
            const float *here = g + (i - first) * one->cells;
            if (sorted) {
                sort_out(one, i, here);
            } else {
                learn(one, i, here);
                if (one > net->block) pass_back(one, i, here);
            }
        }
        if (sorted) {
            learn_by_channel(one, first, end);
            pass_back_by_result(one, first, end);
        }
        if (one == net->block) return;
        for (int i = first; i < end; i++) unframe(one, i, one->below + (i - first) * one[-1].cells);
    }
}

/* a step of the blocks */
static void descend_blocks(const network *net, int batch) {
    const block *last = net->block + net->blocks - 1;
    for (const block *one = net->block; one <= last; one++) {
        memset(one->change, 0, (size_t)one->out_row * one->kernel * one->run * sizeof(float));
        memset(one->bias_change, 0, one->out_row * sizeof(float));
    }
    for (int i = 0; i < batch; i += net->group)
        learn_from(net, i, batch - i < net->group ? batch : i + net->group);
    for (const block *one = net->block; one <= last; one++) {
        if (net->alone) {
            memset(one->weight, 0, (size_t)one->out_row * one->kernel * one->run * sizeof(float));
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
    int classes = form->sizes[form->layers], row = net.layer[net.layers - 1].out_row;
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

/* the sum of (v - from)^2, or of v^2 where `from` is NULL. Blocks are summed in float, in ways whose number is fixed so
   that every processor adds in the same order; the result is infinite if a square is, also where v is finite */
double squares(const float *restrict v, const float *restrict from, int64_t n) {
    enum { WAYS = 32, BLOCK = 4096 };
    static const float zeros[BLOCK];
    double total = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const float *a = v + i, *b = from ? from + i : zeros;
        int64_t m = n - i < BLOCK ? n - i : BLOCK, k = 0;
        float ways[WAYS] = {0};
        for (; k + WAYS <= m; k += WAYS)
            for (int w = 0; w < WAYS; w++) ways[w] += (a[k + w] - b[k + w]) * (a[k + w] - b[k + w]);
        for (int w = 0; k < m; k++, w++) ways[w] += (a[k] - b[k]) * (a[k] - b[k]);
        for (int w = 0; w < WAYS; w++) total += ways[w];
    }
    return total;
}

/* total += weight * v, each term rounded to a multiple of what is left of it beside `grid`: see aggregate.py */
void accumulate(double *restrict total, const float *restrict v, int64_t n, double weight, double grid) {
    for (int64_t i = 0; i < n; i++) total[i] += (grid + weight * v[i]) - grid;
}

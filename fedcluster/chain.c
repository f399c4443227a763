/* E steps of plain SGD on a chain of linear layers with ReLU between them and the mean cross-entropy at its end; the
   evaluation of such a chain; and the two passes that the server makes over an update.

   A step of a small network is a few products of thin matrices. Here they are written for the caches of one core:
   weights are held transposed, [in][out], rows padded to whole vectors, so that both the forward product and the
   update run along rows; an update adds the sum over the batch to the weights in one pass; nothing is allocated and
   nothing is called between steps.

   Every sum is formed on its own before it is added to a weight, in the order of the batch. One thread. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float vector __attribute__((vector_size(32), aligned(4)));
typedef int32_t mask __attribute__((vector_size(32)));
enum { LANES = 8, ROWS = 6, MOST = 16 };

#define INLINE static inline __attribute__((always_inline))

static int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

INLINE vector load(const float *p) { return *(const vector *)p; }
INLINE void store(float *p, vector v) { *(vector *)p = v; }
INLINE vector all(float f) { return (vector){f, f, f, f, f, f, f, f}; }

/* c[rows][wide vectors] = bias + a[rows][n] b[n][...], for a tile that fits the registers */
INLINE void forward_tile(int rows, int wide, const float *a, int a_row, const float *b, int b_row, int n,
                         const float *bias, float *c, int c_row, int relu) {
    vector sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) sum[r][v] = load(bias + v * LANES);
    for (int k = 0; k < n; k++) {
        vector right[2];
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) right[v] = load(b + (size_t)k * b_row + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vector left = all(a[r * a_row + k]);
#pragma GCC unroll 2
            for (int v = 0; v < wide; v++) sum[r][v] += left * right[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) {
            vector s = sum[r][v];
            if (relu) s = (vector)((mask)s & ~(s <= 0)); /* NaN stays NaN */
            store(c + r * c_row + v * LANES, s);
        }
}

/* w[rows][wide] += sum over the batch of a[batch][rows] d[batch][wide], and what is added in every step */
INLINE void update_tile(int rows, int wide, const float *a, int a_row, const float *d, int d_row, int batch, float *w,
                        int w_row, const float *drift) {
    vector sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) sum[r][v] = all(0);
    for (int k = 0; k < batch; k++) {
        vector right[2];
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) right[v] = load(d + k * d_row + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vector left = all(a[k * a_row + r]);
#pragma GCC unroll 2
            for (int v = 0; v < wide; v++) sum[r][v] += left * right[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) {
            size_t at = (size_t)r * w_row + v * LANES;
            store(w + at, load(w + at) + (drift ? sum[r][v] + load(drift + at) : sum[r][v]));
        }
}

#define FOR_ROWS(rows, CALL) \
    switch (rows) {          \
    case 6: CALL(6); break;  \
    case 5: CALL(5); break;  \
    case 4: CALL(4); break;  \
    case 3: CALL(3); break;  \
    case 2: CALL(2); break;  \
    default: CALL(1);        \
    }

/* c[m][padded(out)] = bias + a[m][n] w[n][...] */
static void forward(const float *a, int a_row, int m, int n, const float *w, const float *bias, int out, float *c,
                    int relu) {
    int row = padded(out);
    for (int j = 0; j < row; j += 2 * LANES) {
        int wide = row - j >= 2 * LANES ? 2 : 1;
        for (int i = 0; i < m; i += ROWS) {
            int rows = m - i < ROWS ? m - i : ROWS;
#define CALL(R)                                                                                                      \
    if (wide == 2)                                                                                                   \
        forward_tile(R, 2, a + i * a_row, a_row, w + j, row, n, bias + j, c + i * row + j, row, relu);               \
    else                                                                                                             \
        forward_tile(R, 1, a + i * a_row, a_row, w + j, row, n, bias + j, c + i * row + j, row, relu)
            FOR_ROWS(rows, CALL)
#undef CALL
        }
    }
}

/* w[n][padded(out)] += a[batch][n]^T d[batch][padded(out)] + drift */
static void update(const float *a, int a_row, int batch, int n, const float *d, int out, float *w,
                   const float *drift) {
    int row = padded(out);
    for (int i = 0; i < n; i += ROWS) {
        int rows = n - i < ROWS ? n - i : ROWS;
        for (int j = 0; j < row; j += 2 * LANES) {
            int wide = row - j >= 2 * LANES ? 2 : 1;
            size_t at = (size_t)i * row + j;
#define CALL(R)                                                                                                      \
    if (wide == 2)                                                                                                   \
        update_tile(R, 2, a + i, a_row, d + j, row, batch, w + at, row, drift ? drift + at : 0);                     \
    else                                                                                                             \
        update_tile(R, 1, a + i, a_row, d + j, row, batch, w + at, row, drift ? drift + at : 0)
            FOR_ROWS(rows, CALL)
#undef CALL
        }
    }
}

/* the lanes of two vectors, counted through, that make up a third */
#if defined(__clang__) || __GNUC__ >= 12
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif

/* an 8 by 8 block: neighbours, then pairs, then halves change places */
INLINE void flip_tile(const float *from, int from_row, float *to, int to_row) {
    vector a[LANES], b[LANES];
#pragma GCC unroll 8
    for (int r = 0; r < LANES; r++) a[r] = load(from + (size_t)r * from_row);
#pragma GCC unroll 4
    for (int r = 0; r < LANES; r += 2) {
        b[r] = LANES_OF(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[r + 1] = LANES_OF(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int r = 0; r < LANES; r += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            a[r + 2 * k] = LANES_OF(b[r + k], b[r + 2 + k], 0, 1, 8, 9, 4, 5, 12, 13);
            a[r + 2 * k + 1] = LANES_OF(b[r + k], b[r + 2 + k], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
    for (int r = 0; r < LANES / 2; r++) {
        store(to + (size_t)r * to_row, LANES_OF(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (size_t)(r + 4) * to_row, LANES_OF(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

/* to[columns][to_row] = the transpose of from[rows][from_row] */
static void flip(const float *from, int from_row, int rows, int columns, float *to, int to_row) {
    int r = 0;
    for (; r + LANES <= rows; r += LANES) {
        const float *row = from + (size_t)r * from_row;
        int c = 0;
        for (; c + LANES <= columns; c += LANES) flip_tile(row + c, from_row, to + (size_t)c * to_row + r, to_row);
        for (; c < columns; c++)
            for (int i = 0; i < LANES; i++) to[(size_t)c * to_row + r + i] = row[(size_t)i * from_row + c];
    }
    for (; r < rows; r++)
        for (int c = 0; c < columns; c++) to[(size_t)c * to_row + r] = from[(size_t)r * from_row + c];
}

/* ReLU's derivative: zero where the layer's output is */
static void mask_by(const float *output, float *gradient, int n) {
    for (int i = 0; i < n; i++) gradient[i] = output[i] <= 0 ? 0 : gradient[i];
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

/* one batch out of the data set, by the numbers of its rows; those of the batch after it are called for meanwhile */
static void gather(const samples *from, const int64_t *rows, int batch, int n, float *restrict x, int64_t *y,
                   int more) {
    int64_t size = n * (from->bytes ? 1 : (int64_t)sizeof(float));
    for (int i = 0; i < batch; i++, x += n) {
        y[i] = from->y[rows[i]];
        if (i < more) {
            const char *next = (const char *)from->x + rows[batch + i] * size;
            for (int64_t j = 0; j < size; j += 64) __builtin_prefetch(next + j, 0, 2);
        }
        if (!from->bytes) {
            memcpy(x, (const float *)from->x + rows[i] * n, n * sizeof(float));
            continue;
        }
        const uint8_t *row = (const uint8_t *)from->x + rows[i] * n;
        int plane = n / from->channels;
        for (int c = 0; c < from->channels; c++) {
            float scale = from->scale[c], shift = from->shift[c];
            for (int j = c * plane; j < (c + 1) * plane; j++) x[j] = row[j] * scale + shift;
        }
    }
}

/* one layer, its weights transposed, with room for all that a step needs of it */
typedef struct {
    int in, out, in_row, out_row;
    float *weight, *bias, *output, *gradient, *turned, *zeros, *drift, *bias_drift;
} layer;

/* lays the layers out in scratch memory, if there is any; returns how many floats they take */
static int64_t lay_out(layer *layers, const int *sizes, int count, int batch, int drifting, float *room) {
    int64_t used = (int64_t)batch * (sizes[0] + 2); /* a batch of samples and of labels */
#define TAKE(place, n) (place = room ? room + used : 0, used += (int64_t)(n))
    for (int l = 0; l < count; l++) {
        layer *one = &layers[l];
        one->in = sizes[l], one->out = sizes[l + 1];
        one->out_row = padded(one->out), one->in_row = l ? padded(one->in) : one->in;
        TAKE(one->weight, (int64_t)one->in * one->out_row);
        TAKE(one->bias, one->out_row);
        TAKE(one->output, batch * one->out_row);
        TAKE(one->gradient, batch * one->out_row);
        if (l) {
            TAKE(one->turned, (int64_t)one->out * one->in_row);
            TAKE(one->zeros, one->in_row);
        }
        one->drift = one->bias_drift = 0;
        if (drifting) {
            TAKE(one->drift, (int64_t)one->in * one->out_row);
            TAKE(one->bias_drift, one->out_row);
        }
    }
#undef TAKE
    return used;
}

/* floats of scratch memory that `descend` needs */
int64_t scratch(const int *sizes, int count, int batch, int drifting) {
    layer layers[MOST];
    return lay_out(layers, sizes, count, batch, drifting, 0);
}

/* the layers out of w (first to last, each as weight [out][in] and bias [out]) and of what is of its form; where
   rows are padded, zero */
static void read_in(layer *layers, int count, const float *w, const float *drift) {
    for (layer *one = layers; one < layers + count; one++) {
        size_t whole = (size_t)one->in * one->out, wide = (size_t)one->in * one->out_row;
        if (one->out_row > one->out) memset(one->weight, 0, wide * sizeof(float));
        flip(w, one->in, one->out, one->in, one->weight, one->out_row);
        memset(one->bias, 0, one->out_row * sizeof(float));
        memcpy(one->bias, w + whole, one->out * sizeof(float));
        w += whole + one->out;
        if (one > layers) {
            memset(one->zeros, 0, one->in_row * sizeof(float));
            if (one->in_row > one->in) memset(one->turned, 0, (size_t)one->out * one->in_row * sizeof(float));
        }
        if (!drift) continue;
        if (one->out_row > one->out) memset(one->drift, 0, wide * sizeof(float));
        flip(drift, one->in, one->out, one->in, one->drift, one->out_row);
        memset(one->bias_drift, 0, one->out_row * sizeof(float));
        memcpy(one->bias_drift, drift + whole, one->out * sizeof(float));
        drift += whole + one->out;
    }
}

/* the last layer's output for the batch at x */
static const float *scores_of(const layer *layers, int count, const float *x, int batch) {
    for (int l = 0; l < count; x = layers[l++].output)
        forward(x, layers[l].in_row, batch, layers[l].in, layers[l].weight, layers[l].bias, layers[l].out,
                layers[l].output, l < count - 1);
    return x;
}

/* E steps: rows is [steps][batch], places in the data set; drift, of the form of w or null, is added to w after each */
void descend(float *w, const float *drift, const int *sizes, int count, const samples *from, const int64_t *rows,
             int steps, int batch, float lr, float *room) {
    layer layers[MOST];
    int64_t *y = (int64_t *)room;
    float *x = room + 2 * batch;
    lay_out(layers, sizes, count, batch, drift != 0, room);
    read_in(layers, count, w, drift);
    layer *last = &layers[count - 1];
    for (int step = 0; step < steps; step++, rows += batch) {
        gather(from, rows, batch, sizes[0], x, y, step + 1 < steps ? batch : 0);
        scores_of(layers, count, x, batch);
        slope(last->output, last->out_row, last->out, batch, y, lr);
        for (layer *one = last; one >= layers; one--) {
            const float *d = one == last ? one->output : one->gradient;
            const float *below = one == layers ? x : one[-1].output;
            if (one > layers) {
                flip(one->weight, one->out_row, one->in, one->out, one->turned, one->in_row);
                forward(d, one->out_row, batch, one->out, one->turned, one->zeros, one->in, one[-1].gradient, 0);
                mask_by(below, one[-1].gradient, batch * one->in_row);
            }
            update(below, one->in_row, batch, one->in, d, one->out, one->weight, one->drift);
            for (int j = 0; j < one->out_row; j += LANES) {
                vector sum = one->bias_drift ? load(one->bias_drift + j) : all(0);
                for (int i = 0; i < batch; i++) sum += load(d + i * one->out_row + j);
                store(one->bias + j, load(one->bias + j) + sum);
            }
        }
    }
    for (layer *one = layers; one <= last; one++) {
        flip(one->weight, one->out_row, one->in, one->out, w, one->in);
        memcpy(w += (int64_t)one->in * one->out, one->bias, one->out * sizeof(float));
        w += one->out;
    }
}

/* of every batch (the last may be smaller) of n rows: the summed cross-entropy, and how many scores are right */
void score(const float *w, const int *sizes, int count, const samples *from, const int64_t *rows, int64_t n, int batch,
           double *losses, int64_t *right, float *room) {
    layer layers[MOST];
    int64_t *y = (int64_t *)room;
    float *x = room + 2 * batch;
    lay_out(layers, sizes, count, batch, 0, room);
    read_in(layers, count, w, 0);
    int classes = sizes[count], row = padded(classes);
    for (; n > 0; n -= batch, rows += batch, losses++, right++) {
        int here = n < batch ? n : batch;
        gather(from, rows, here, sizes[0], x, y, 0);
        const float *s = scores_of(layers, count, x, here);
        *losses = 0, *right = 0;
        for (int i = 0; i < here; i++, s += row) {
            int best = 0;
            float sum = 0;
            for (int c = 1; c < classes; c++) best = s[c] > s[best] ? c : best;
            for (int c = 0; c < classes; c++) sum += expf(s[c] - s[best]);
            *losses += logf(sum) + s[best] - s[y[i]];
            *right += best == y[i];
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

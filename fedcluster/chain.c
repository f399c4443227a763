/* E steps of plain SGD on a chain of linear layers with ReLU between them and the mean cross-entropy at its end.

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

/* w[rows][wide] += sum over the batch of a[batch][rows] d[batch][wide] */
INLINE void update_tile(int rows, int wide, const float *a, int a_row, const float *d, int d_row, int batch, float *w,
                        int w_row) {
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
            float *p = w + (size_t)r * w_row + v * LANES;
            store(p, load(p) + sum[r][v]);
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

/* w[n][padded(out)] += a[batch][n]^T d[batch][padded(out)] */
static void update(const float *a, int a_row, int batch, int n, const float *d, int out, float *w) {
    int row = padded(out);
    for (int i = 0; i < n; i += ROWS) {
        int rows = n - i < ROWS ? n - i : ROWS;
        for (int j = 0; j < row; j += 2 * LANES) {
            int wide = row - j >= 2 * LANES ? 2 : 1;
#define CALL(R)                                                                                                      \
    if (wide == 2)                                                                                                   \
        update_tile(R, 2, a + i, a_row, d + j, row, batch, w + (size_t)i * row + j, row);                            \
    else                                                                                                             \
        update_tile(R, 1, a + i, a_row, d + j, row, batch, w + (size_t)i * row + j, row)
            FOR_ROWS(rows, CALL)
#undef CALL
        }
    }
}

/* to[columns][to_row] = the transpose of from[rows][from_row] */
static void flip(const float *from, int from_row, int rows, int columns, float *to, int to_row) {
    for (int r0 = 0; r0 < rows; r0 += LANES)
        for (int c0 = 0; c0 < columns; c0 += LANES)
            for (int r = r0; r < r0 + LANES && r < rows; r++)
                for (int c = c0; c < c0 + LANES && c < columns; c++)
                    to[(size_t)c * to_row + r] = from[(size_t)r * from_row + c];
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

/* floats of scratch memory that `descend` needs */
int64_t scratch(const int *sizes, int layers, int batch) {
    int64_t room = 0;
    for (int l = 0; l < layers; l++) {
        int in = sizes[l], out = sizes[l + 1];
        room += (int64_t)padded(out) * (in + 1 + 2 * batch) + (l ? (int64_t)out * padded(in) + padded(in) : 0);
    }
    return room;
}

/* w: the layers, first to last, each as weight [out][in] and bias [out]; x: [steps * batch][in], y: labels */
void descend(float *w, const int *sizes, int layers, const float *x, const int64_t *y, int steps, int batch, float lr,
             float *room) {
    float *weight[MOST], *turned[MOST], *zeros[MOST], *bias[MOST], *output[MOST], *gradient[MOST], *from = w;
    memset(room, 0, scratch(sizes, layers, batch) * sizeof(float));
    for (int l = 0; l < layers; l++) {
        int in = sizes[l], out = sizes[l + 1], row = padded(out);
        weight[l] = room, room += (size_t)in * row;
        bias[l] = room, room += row;
        output[l] = room, room += batch * row;
        gradient[l] = room, room += batch * row;
        if (l) turned[l] = room, room += (size_t)out * padded(in), zeros[l] = room, room += padded(in);
        flip(from, in, out, in, weight[l], row);
        memcpy(bias[l], from + (size_t)in * out, out * sizeof(float));
        from += (size_t)(in + 1) * out;
    }
    for (int step = 0; step < steps; step++, x += (size_t)batch * sizes[0], y += batch) {
        for (int l = 0; l < layers; l++)
            forward(l ? output[l - 1] : x, l ? padded(sizes[l]) : sizes[0], batch, sizes[l], weight[l], bias[l],
                    sizes[l + 1], output[l], l + 1 < layers);
        int last = layers - 1;
        slope(output[last], padded(sizes[layers]), sizes[layers], batch, y, lr);
        for (int l = last; l >= 0; l--) {
            const float *d = l == last ? output[l] : gradient[l];
            int row = padded(sizes[l + 1]);
            if (l) {
                flip(weight[l], row, sizes[l], sizes[l + 1], turned[l], padded(sizes[l]));
                forward(d, row, batch, sizes[l + 1], turned[l], zeros[l], sizes[l], gradient[l - 1], 0);
                mask_by(output[l - 1], gradient[l - 1], batch * padded(sizes[l]));
            }
            update(l ? output[l - 1] : x, l ? padded(sizes[l]) : sizes[0], batch, sizes[l], d, sizes[l + 1], weight[l]);
            for (int j = 0; j < row; j += LANES) {
                vector sum = all(0);
                for (int i = 0; i < batch; i++) sum += load(d + i * row + j);
                store(bias[l] + j, load(bias[l] + j) + sum);
            }
        }
    }
    for (int l = 0; l < layers; l++) {
        int in = sizes[l], out = sizes[l + 1];
        flip(weight[l], padded(out), in, out, w, in);
        memcpy(w + (size_t)in * out, bias[l], out * sizeof(float));
        w += (size_t)(in + 1) * out;
    }
}

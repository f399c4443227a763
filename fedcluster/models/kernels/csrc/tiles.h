/* Products of thin matrices, as tiles that fit the registers of one core. Rows of what a product makes are padded to
   whole vectors. */

#pragma once

#include <stdint.h>
#include <string.h>

typedef float vector __attribute__((vector_size(32), aligned(4)));
typedef int32_t mask __attribute__((vector_size(32)));
enum { LANES = 8, ROWS = 6 };

#define INLINE static inline __attribute__((always_inline))

static int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

/* floats from one row of a layer to the next: whole vectors, and a cache line more where rows would be a large power of
   two apart and compete for the same few places in the cache */
static int spaced(int n) {
    int row = padded(n);
    return row % 512 ? row : row + 2 * LANES;
}

INLINE vector load(const float *p) { return *(const vector *)p; }
INLINE void store(float *p, vector v) { *(vector *)p = v; }
INLINE vector all(float f) { return (vector){f, f, f, f, f, f, f, f}; }

/* c[rows][wide vectors] = start + a[rows][n] b[n][...], for a tile that fits the registers. a is given by the places
   of its rows; a convolution's are in several runs of n, at some places from there. */
INLINE void forward_tile(int rows, int wide, int runs, const int *places, const float *const *a, const float *b,
                         int b_row, int n, const float *start, int start_row, float *c, int c_row, int relu) {
    vector sum[ROWS][2];
    const float *from[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        from[r] = a[r];
#pragma GCC unroll 2
        for (int v = 0; v < wide; v++) sum[r][v] = load(start + r * start_row + v * LANES);
    }
    for (int run = 0; run < runs; run++)
        for (int64_t k = places[run], end = k + n; k < end; k++, b += b_row) {
            vector right[2];
#pragma GCC unroll 2
            for (int v = 0; v < wide; v++) right[v] = load(b + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                vector left = all(from[r][k]);
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

/* c[m][row] = bias + a[m][n] w[n][row] */
static void forward(const float *a, int a_row, int m, int n, const float *w, const float *bias, int row, float *c,
                    int relu) {
    for (int j = 0; j < row; j += 2 * LANES) {
        int wide = row - j >= 2 * LANES ? 2 : 1;
        for (int i = 0; i < m; i += ROWS) {
            int rows = m - i < ROWS ? m - i : ROWS;
            const float *from[ROWS];
            for (int r = 0; r < rows; r++) from[r] = a + (size_t)(i + r) * a_row;
            float *to = c + (size_t)i * row + j;
#define CALL(R)                                                                                                      \
    if (wide == 2)                                                                                                   \
        forward_tile(R, 2, 1, &(int){0}, from, w + j, row, n, bias + j, 0, to, row, relu);                           \
    else                                                                                                             \
        forward_tile(R, 1, 1, &(int){0}, from, w + j, row, n, bias + j, 0, to, row, relu)
            FOR_ROWS(rows, CALL)
#undef CALL
        }
    }
}

/* w[n][row] += a[batch][n]^T d[batch][row] + drift. Where d is large, some tiles of rows share what is loaded of
   d, which would not stay in the cache from one sweep over it to the next. */
static void update(const float *a, int a_row, int batch, int n, const float *d, int row, float *w,
                   const float *drift) {
    int group = ((int64_t)batch * row > 1 << 17 ? 8 : 1) * ROWS;
    for (int first = 0; first < n; first += group)
        for (int j = 0; j < row; j += 2 * LANES) {
            int wide = row - j >= 2 * LANES ? 2 : 1;
            for (int i = first; i < n && i < first + group; i += ROWS) {
                int rows = n - i < ROWS ? n - i : ROWS;
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

static void flip_strip(const float *from, int from_row, int rows, int columns, float *to, int to_row) {
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

/* to[columns][to_row] = the transpose of from[rows][from_row], a cache line wide at a time: rows that are a power of
   two apart compete for the same places in the cache, and of more of them the lines would be gone half written */
static void flip(const float *from, int from_row, int rows, int columns, float *to, int to_row) {
    enum { WIDE = 2 * LANES };
    for (int c = 0; c < columns; c += WIDE)
        flip_strip(from + c, from_row, rows, columns - c < WIDE ? columns - c : WIDE, to + (size_t)c * to_row, to_row);
}

/* Products of thin matrices, computed in tiles that fit the registers of one core. Rows of what a product makes are
   padded to whole vectors. Every sum is formed on its own, in the order of its terms, before it is added to anything. */

#pragma once

#include "simd.h"

enum { TILE_ROWS = 6 };

/* c[m][row] = bias + a[m][n] w[n][row], then ReLU or not */
void matmul_bias(const float *a, int a_row, int m, int n, const float *w, const float *bias, int row, float *c,
                 int with_relu);

/* w[n][row] += a[batch][n]^T d[batch][row] + offset; offset may be NULL */
void add_outer_products(const float *a, int a_row, int batch, int n, const float *d, int row, float *w,
                        const float *offset);

/* One tile: c[rows][vectors] = start + a[rows][n] b[n][vectors]. A row of `a` is given by its address; it may consist
   of several segments of n floats each, which begin at these offsets (a patch of a convolution does). */
INLINE void matmul_tile(int rows, int vectors, int segments, const int *offsets, const float *const *a, const float *b,
                        int b_row, int n, const float *start, int start_row, float *c, int c_row, int with_relu) {
    vector sum[TILE_ROWS][2];
    const float *from[TILE_ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        from[r] = a[r];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[r][v] = load(start + r * start_row + v * LANES);
    }
    for (int segment = 0; segment < segments; segment++)
        for (int64_t k = offsets[segment], end = k + n; k < end; k++, b += b_row) {
            vector right[2];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) right[v] = load(b + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                vector left = broadcast(from[r][k]);
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) sum[r][v] += left * right[v];
            }
        }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            store(c + r * c_row + v * LANES, with_relu ? relu(sum[r][v]) : sum[r][v]);
}

/* Expands CALL(R) with R = rows as a constant, so that each tile is unrolled. */
#define DISPATCH_ROWS(rows, CALL) \
    switch (rows) {               \
    case 6: CALL(6); break;       \
    case 5: CALL(5); break;       \
    case 4: CALL(4); break;       \
    case 3: CALL(3); break;       \
    case 2: CALL(2); break;       \
    default: CALL(1);             \
    }

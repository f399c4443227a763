#include "matmul.h"

void matmul_bias(const float *a, int a_row, int m, int n, const float *w, const float *bias, int row, float *c,
                 int with_relu) {
    for (int j = 0; j < row; j += 2 * LANES) {
        int vectors = row - j >= 2 * LANES ? 2 : 1;
        for (int i = 0; i < m; i += TILE_ROWS) {
            int rows = m - i < TILE_ROWS ? m - i : TILE_ROWS;
            const float *from[TILE_ROWS];
            for (int r = 0; r < rows; r++) from[r] = a + (size_t)(i + r) * a_row;
            float *to = c + (size_t)i * row + j;
#define CALL(R)                                                                                                      \
    if (vectors == 2)                                                                                                \
        matmul_tile(R, 2, 1, &(int){0}, from, w + j, row, n, bias + j, 0, to, row, with_relu);                       \
    else                                                                                                             \
        matmul_tile(R, 1, 1, &(int){0}, from, w + j, row, n, bias + j, 0, to, row, with_relu)
            DISPATCH_ROWS(rows, CALL)
#undef CALL
        }
    }
}

/* w[rows][vectors] += the sum over the batch of a[batch][rows] d[batch][vectors], + offset */
INLINE void outer_product_tile(int rows, int vectors, const float *a, int a_row, const float *d, int d_row, int batch,
                               float *w, int w_row, const float *offset) {
    vector sum[TILE_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[r][v] = broadcast(0);
    for (int k = 0; k < batch; k++) {
        vector right[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) right[v] = load(d + k * d_row + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vector left = broadcast(a[k * a_row + r]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sum[r][v] += left * right[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            size_t at = (size_t)r * w_row + v * LANES;
            store(w + at, load(w + at) + (offset ? sum[r][v] + load(offset + at) : sum[r][v]));
        }
}

void add_outer_products(const float *a, int a_row, int batch, int n, const float *d, int row, float *w,
                        const float *offset) {
    /* where d is larger than the cache, several tiles of rows share what is loaded of it */
    int group = ((int64_t)batch * row > 1 << 17 ? 8 : 1) * TILE_ROWS;
    for (int first = 0; first < n; first += group)
        for (int j = 0; j < row; j += 2 * LANES) {
            int vectors = row - j >= 2 * LANES ? 2 : 1;
            for (int i = first; i < n && i < first + group; i += TILE_ROWS) {
                int rows = n - i < TILE_ROWS ? n - i : TILE_ROWS;
                size_t at = (size_t)i * row + j;
#define CALL(R)                                                                                                      \
    if (vectors == 2)                                                                                                \
        outer_product_tile(R, 2, a + i, a_row, d + j, row, batch, w + at, row, offset ? offset + at : 0);            \
    else                                                                                                             \
        outer_product_tile(R, 1, a + i, a_row, d + j, row, batch, w + at, row, offset ? offset + at : 0)
                DISPATCH_ROWS(rows, CALL)
#undef CALL
            }
        }
}

/* Sums over patches, in tiles of `size` rows of a patch, each so many vectors wide as the registers have room for. */

#pragma once

#include "conv_parts.h"

/* Expands CALL(size, vectors, at) with constants for every tile of a patch; `at` is the tile's offset in it. */
#define FOR_PATCH_TILES(shape, CALL)                                                              \
    for (int segment = 0; segment < (shape)->row_segments; segment++)                             \
        for (int v = 0, n = padded((shape)->segment) / LANES, vectors; v < n; v += vectors) {     \
            int most = (shape)->kernel == 3 ? 3 : 2;                                              \
            int at = segment * (shape)->pixel_stride + v * LANES;                                 \
            vectors = n - v < most ? n - v : most;                                                \
            switch ((shape)->kernel * 4 + vectors) {                                              \
            case 3 * 4 + 3: CALL(3, 3, at); break;                                                \
            case 3 * 4 + 2: CALL(3, 2, at); break;                                                \
            case 3 * 4 + 1: CALL(3, 1, at); break;                                                \
            case 5 * 4 + 2: CALL(5, 2, at); break;                                                \
            default: CALL(5, 1, at);                                                              \
            }                                                                                     \
        }

/* to[size][vectors] += the sum over terms of the gradient times what lies at its offset from `from` */
INLINE void add_terms(int size, int vectors, const term *terms, int count, const float *from, size_t from_line,
                      float *to, size_t to_line) {
    vector sum[MAX_KERNEL][3];
#pragma GCC unroll 5
    for (int y = 0; y < size; y++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) sum[y][v] = broadcast(0);
    for (const term *end = terms + count; terms < end; terms++) {
        vector left = broadcast(terms->grad);
        const float *right = from + terms->offset;
#pragma GCC unroll 5
        for (int y = 0; y < size; y++, right += from_line)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sum[y][v] += left * load(right + v * LANES);
    }
#pragma GCC unroll 5
    for (int y = 0; y < size; y++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            float *at = to + y * to_line + v * LANES;
            store(at, load(at) + sum[y][v]);
        }
}

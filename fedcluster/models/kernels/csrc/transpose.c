#include "transpose.h"

/* Lanes of two vectors, numbered 0 to 15, that make up a third. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif

/* 8 by 8 floats: single lanes, then pairs, then halves change places */
INLINE void transpose_tile(const float *from, int from_row, float *to, int to_row) {
    vector a[LANES], b[LANES];
#pragma GCC unroll 8
    for (int r = 0; r < LANES; r++) a[r] = load(from + (size_t)r * from_row);
#pragma GCC unroll 4
    for (int r = 0; r < LANES; r += 2) {
        b[r] = SHUFFLE(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[r + 1] = SHUFFLE(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int r = 0; r < LANES; r += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            a[r + 2 * k] = SHUFFLE(b[r + k], b[r + 2 + k], 0, 1, 8, 9, 4, 5, 12, 13);
            a[r + 2 * k + 1] = SHUFFLE(b[r + k], b[r + 2 + k], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
    for (int r = 0; r < LANES / 2; r++) {
        store(to + (size_t)r * to_row, SHUFFLE(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (size_t)(r + 4) * to_row, SHUFFLE(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

static void transpose_strip(const float *from, int from_row, int rows, int columns, float *to, int to_row) {
    int r = 0;
    for (; r + LANES <= rows; r += LANES) {
        const float *row = from + (size_t)r * from_row;
        int c = 0;
        for (; c + LANES <= columns; c += LANES)
            transpose_tile(row + c, from_row, to + (size_t)c * to_row + r, to_row);
        for (; c < columns; c++)
            for (int i = 0; i < LANES; i++) to[(size_t)c * to_row + r + i] = row[(size_t)i * from_row + c];
    }
    for (; r < rows; r++)
        for (int c = 0; c < columns; c++) to[(size_t)c * to_row + r] = from[(size_t)r * from_row + c];
}

/* Strips are one cache line wide: rows that are a power of two apart compete for the same sets of the cache, so that
   lines of a wider strip would be evicted half written. */
void transpose(const float *from, int from_row, int rows, int columns, float *to, int to_row) {
    enum { STRIP = 2 * LANES };
    for (int c = 0; c < columns; c += STRIP)
        transpose_strip(from + c, from_row, rows, columns - c < STRIP ? columns - c : STRIP, to + (size_t)c * to_row,
                        to_row);
}

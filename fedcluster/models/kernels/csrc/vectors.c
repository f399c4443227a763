/* The passes that the server makes over every update. */

#include <string.h>

#include "engine.h"

/* Whether no element is NaN or infinite: those have all bits of the exponent set. */
int all_finite(const float *v, int64_t n) {
    uint32_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, v + i, sizeof bits);
        found |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !found;
}

/* sum (v - origin)^2, or sum v^2 where `origin` is NULL. Blocks are summed in float32, in a fixed number of partial
   sums, so that every processor adds in the same order. The result is infinite if a square is, even where v is finite. */
double sum_of_squares(const float *restrict v, const float *restrict origin, int64_t n) {
    enum { PARTS = 32, BLOCK = 4096 };
    static const float zeros[BLOCK];
    double total = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const float *a = v + i, *b = origin ? origin + i : zeros;
        int64_t m = n - i < BLOCK ? n - i : BLOCK, k = 0;
        float parts[PARTS] = {0};
        for (; k + PARTS <= m; k += PARTS)
            for (int p = 0; p < PARTS; p++) parts[p] += (a[k + p] - b[k + p]) * (a[k + p] - b[k + p]);
        for (int p = 0; k < m; k++, p++) parts[p] += (a[k] - b[k]) * (a[k] - b[k]);
        for (int p = 0; p < PARTS; p++) total += parts[p];
    }
    return total;
}

/* total += weight * v, each term rounded to a multiple of the last bit of `grid`: see algorithms/aggregation/mean.py */
void add_rounded(double *restrict total, const float *restrict v, int64_t n, double weight, double grid) {
    for (int64_t i = 0; i < n; i++) total[i] += (grid + weight * v[i]) - grid;
}

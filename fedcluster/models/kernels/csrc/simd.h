/* Vectors of eight floats, and sizes that are padded to whole vectors. */

#pragma once

#include <stddef.h>
#include <stdint.h>

typedef float vector __attribute__((vector_size(32), aligned(4))); /* may lie at any float */
typedef int32_t mask __attribute__((vector_size(32)));             /* -1 or 0 in each lane */
enum { LANES = 8 };

#define INLINE static inline __attribute__((always_inline))

INLINE int padded(int n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int min(int a, int b) { return a < b ? a : b; }

INLINE vector load(const float *p) { return *(const vector *)p; }
INLINE void store(float *p, vector v) { *(vector *)p = v; }
INLINE vector broadcast(float f) { return (vector){f, f, f, f, f, f, f, f}; }

/* max(v, 0); NaN stays NaN */
INLINE vector relu(vector v) { return (vector)((mask)v & ~(v <= 0)); }

/* in_grad = out_grad where the output of ReLU is above zero, else 0; n is a multiple of LANES */
INLINE void relu_backward(const float *output, const float *out_grad, int n, float *in_grad) {
    for (int i = 0; i < n; i += LANES)
        store(in_grad + i, (vector)((mask)load(out_grad + i) & ~(load(output + i) <= 0)));
}

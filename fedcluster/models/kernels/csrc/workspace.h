/* An arena: hands out arrays from one block of memory. In a build with AddressSanitizer there is a red zone after every
   array, so that an access beyond it ends the process. */

#pragma once

#include <stdint.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { RED_ZONE = 64 };
#else
enum { RED_ZONE = 0 };
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)0)
#endif

typedef struct {
    float *base; /* NULL: only count */
    int64_t used;
} arena;

/* memory for n numbers of 4 bytes, aligned as the arena is, to at most a cache line */
static inline void *take(arena *memory, int64_t n) {
    enum { LINE = 16 };
    float *array = memory->base ? memory->base + memory->used : 0;
    int64_t size = (n + LINE - 1) / LINE * LINE + RED_ZONE;
    if (array) {
        ASAN_UNPOISON_MEMORY_REGION(array, n * sizeof(float));
        ASAN_POISON_MEMORY_REGION(array + n, (size - n) * sizeof(float));
    }
    memory->used += size;
    return array;
}

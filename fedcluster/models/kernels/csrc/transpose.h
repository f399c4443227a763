#pragma once

#include "simd.h"

/* to[columns][to_row] = the transpose of from[rows][from_row] */
void transpose(const float *from, int from_row, int rows, int columns, float *to, int to_row);

// What the scan kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

namespace capibara {

// h[t] = a[t] h[t-1] + x[t], elementwise over rows of `width` numbers. Late: out[t] = x[t] + u, then u = a[t] out[t].
struct Recurrence {
  int64_t steps, width;
  int64_t a_step;  // numbers from one row of coefficients to the next; 0 where there is one only
  int64_t threads;
  bool reverse, late;
  const float *a, *x, *first;
  float *out, *last;
};

// h = exp(dt a) h + dt x b, y = h c, for every head; `outer` problems of `batch` elements, each with its own rates.
struct SelectiveScan {
  int64_t outer, batch, length, heads, width, groups, states;
  const float *x, *dt, *a, *b, *c, *first;
  float *y, *last;
};

// Its gradient. The heads of a group are cut into `parts` (no part is empty); those of the first write what they add to
// the gradients of b and c into these, the others into arrays of their own: partial [parts - 1][b, c], to be added.
struct SelectiveGradient {
  int64_t outer, batch, length, heads, width, groups, states;
  int64_t parts;
  const float *x, *dt, *a, *b, *c, *first, *y_grad, *last_grad;
  float *x_grad, *dt_grad, *a_grad, *b_grad, *c_grad, *first_grad;  // a_grad: [outer, batch, heads]
  float* partial;
};

struct ScanKernels {
  int64_t (*recurrence_items)(const Recurrence&);
  int64_t (*recurrence_scratch)(const Recurrence&);
  void (*recurrence)(const Recurrence&, int64_t item, float* scratch);
  int64_t (*selective_items)(const SelectiveScan&);
  int64_t (*selective_scratch)(const SelectiveScan&);
  void (*selective)(const SelectiveScan&, int64_t item, float* scratch);
  int64_t (*gradient_items)(const SelectiveGradient&);
  int64_t (*gradient_scratch)(const SelectiveGradient&);
  void (*gradient)(const SelectiveGradient&, int64_t item, float* scratch);
};

}  // namespace capibara

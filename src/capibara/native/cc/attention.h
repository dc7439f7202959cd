// What the attention kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

namespace capibara {

// Steps, in floats, from one batch element, head and position to the next; the last axis is contiguous.
struct Steps {
  int64_t batch, head, position;
};

struct Attention {
  int64_t batch, heads, kv_heads, q_len, kv_len, dim, value_dim;
  int64_t threads;      // that share the items
  int64_t left, right;  // query i sees keys i - left ... i + right
  float scale;
  Steps query_steps, key_steps, value_steps, out_steps;
  const float *query, *key, *value;
  float* out;  // forward: written; backward: read
  float* stat;  // [batch, heads, q_len], the rows' log2-sum-exp2
  const float* out_grad;  // as out
  float *query_grad, *key_grad, *value_grad;
};

// One instruction set's kernels. An item is a piece of work that one thread does alone; `scratch` has room for
// `*_scratch(a)` floats, aligned to 64 bytes.
struct AttentionKernels {
  const char* name;
  int64_t (*forward_items)(const Attention&);
  int64_t (*forward_scratch)(const Attention&);
  void (*forward)(const Attention&, int64_t item, float* scratch);
  int64_t (*backward_items)(const Attention&);
  int64_t (*backward_scratch)(const Attention&);
  void (*backward)(const Attention&, int64_t item, float* scratch);
};

}  // namespace capibara

// What the attention kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

namespace capibara {

// Steps, in numbers, from one batch element, head and position to the next; the last axis is contiguous.
struct Steps {
  int64_t batch, head, position;
};

// Added to the scores: [outer, batch or 1, heads or 1, q_len or 1, kv_len or 1], a step of 0 along an axis of 1.
struct Bias {
  const float* at;  // null without one
  int64_t inner;    // batch elements of one outer element
  int64_t outer, batch, head, row, key;
};

struct Attention {
  int64_t batch, heads, kv_heads, q_len, kv_len, dim, value_dim;
  int64_t threads;      // that share the items
  int64_t left, right;  // query i sees keys i - left ... i + right
  float scale;
  float softcap;  // 0: none
  bool narrow;    // query, key, value, out and their gradients are bfloat16, not float32
  Steps query_steps, key_steps, value_steps, out_steps;
  const void *query, *key, *value;
  Bias bias;
  const int32_t *query_ids, *key_ids;  // [batch, q_len] and [batch, kv_len], or null
  void* out;              // forward: written; backward: read
  float* stat;            // [batch, heads, q_len], the rows' log2-sum-exp2
  const void* out_grad;   // as out
  void *query_grad, *key_grad, *value_grad;
  float* bias_grad;  // as the bias
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
  int64_t (*bias_items)(const Attention&);
  int64_t (*bias_scratch)(const Attention&);
  void (*bias)(const Attention&, int64_t item, float* scratch);
};

}  // namespace capibara

// Attention to keys and values in pages: what the kernels of every instruction set share with the code that calls them.
#pragma once

#include <stdint.h>

namespace capibara {

struct Paged {
  int64_t batch, fresh, heads, kv_heads;  // `fresh` queries of each sequence, at its last positions
  int64_t pages, page_size, table;        // pages of the pool, and of a sequence
  int64_t dim, value_dim;                 // numbers that count of a row of the pool
  int64_t key_width, value_width;         // its length
  int64_t window;                         // the most positions that a query sees; 0: any
  float scale, softcap;                   // softcap 0: none
  bool narrow_query, narrow_key, narrow_value;  // bfloat16, not float32; the result is as the query
  const void* query;                      // [batch, fresh, heads, dim]
  const void *keys, *values;              // [pages, page_size, kv_heads, width]
  const int32_t* page_table;              // [batch, table]
  const int32_t* lengths;                 // [batch]
  const float* sinks;                     // [heads], a logit beside each row's scores; null: none
  void* out;                              // [batch, fresh, heads, value_dim]
};

// An item is a piece of work that one thread does alone, with so many floats of scratch.
struct PagedKernels {
  int64_t (*items)(const Paged&);
  int64_t (*scratch)(const Paged&);
  void (*attend)(const Paged&, int64_t item, float* scratch);
};

}  // namespace capibara

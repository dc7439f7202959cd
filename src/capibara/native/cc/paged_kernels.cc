// Attention to keys and values in pages, compiled once per instruction set. Of each sequence only what it has is read,
// page by page; a block of it is packed in the order in which products read, and softmax goes from block to block.
#include "paged.h"

#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Paged;

constexpr int64_t kBlock = 128;      // positions
constexpr int64_t kPitch = kBlock + 16;
constexpr int64_t kMostRows = 128;   // of an item: queries times the heads that share keys
constexpr float kFloor = -1e29f;     // a row whose best score lies below sees no key
constexpr float kHidden = -1e30f;
constexpr float kLog2E = 1.44269504f;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }
static inline int64_t up(int64_t size) { return parts(size, kWidth) * kWidth; }

static int64_t group(const Paged& p) { return p.heads / p.kv_heads; }
static int64_t queries(const Paged& p) { return least(most(kMostRows / group(p), 1), p.fresh); }

static int64_t paged_items(const Paged& p) {
  return p.fresh == 0 ? 0 : p.batch * p.kv_heads * parts(p.fresh, queries(p));
}

static int64_t paged_scratch(const Paged& p) {
  const int64_t rows = queries(p) * group(p);
  return rows * (p.dim + up(p.value_dim) + kPitch + 2) + p.dim * kPitch + kBlock * up(p.value_dim) + 16 * 6;
}

struct Block {
  int64_t first, count;  // positions
};

// The row of a pool where a position of a sequence lies.
template <typename T>
static inline const T* row_of(const Paged& p, const T* pool, int64_t width, int64_t sequence, int64_t head, int64_t at) {
  const int64_t page = p.page_table[sequence * p.table + at / p.page_size];
  const int64_t held = page < 0 ? 0 : least(page, p.pages - 1);
  return pool + ((held * p.page_size + at % p.page_size) * p.kv_heads + head) * width;
}

// Keys of a block as [dim][kPitch], zeros after the last one.
template <typename T>
static void pack_keys(const Paged& p, int64_t sequence, int64_t head, Block b, float* to) {
  const T* const pool = static_cast<const T*>(p.keys);
  const int64_t whole = p.dim / kWidth * kWidth;
  for (int64_t j = 0; j < b.count; j += kWidth) {
    const T* rows[kWidth];
    const int64_t there = least(b.count - j, kWidth);
    for (int64_t l = 0; l < there; ++l) rows[l] = row_of(p, pool, p.key_width, sequence, head, b.first + j + l);
    for (int64_t d = 0; d < whole; d += kWidth) {
      Vec tile[kWidth];
      for (int64_t l = 0; l < kWidth; ++l) tile[l] = l < there ? load(rows[l] + d) : (Vec){};
      transpose(tile);
      for (int64_t l = 0; l < kWidth; ++l) store(to + (d + l) * kPitch + j, tile[l]);
    }
    for (int64_t d = whole; d < p.dim; ++d)
      for (int64_t l = 0; l < kWidth; ++l) to[d * kPitch + j + l] = l < there ? number(rows[l][d]) : 0;
  }
}

// Values of a block as [count][up(value_dim)].
template <typename T>
static void pack_values(const Paged& p, int64_t sequence, int64_t head, Block b, float* to) {
  const T* const pool = static_cast<const T*>(p.values);
  const int64_t wide = up(p.value_dim);
  for (int64_t j = 0; j < b.count; ++j, to += wide) {
    const T* const row = row_of(p, pool, p.value_width, sequence, head, b.first + j);
    int64_t d = 0;
    for (; d + kWidth <= p.value_dim; d += kWidth) store(to + d, load(row + d));
    if (d == wide) continue;
    store(to + d, (Vec){});
    for (; d < p.value_dim; ++d) to[d] = number(row[d]);
  }
}

template <typename T>
static void read_queries(const Paged& p, int64_t sequence, int64_t head, int64_t first, int64_t count, float* to) {
  const T* const query = static_cast<const T*>(p.query);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t g = 0; g < group(p); ++g, to += p.dim) {
      const T* const row =
          query + (((sequence * p.fresh + first + i) * p.heads) + head * group(p) + g) * p.dim;
      for (int64_t d = 0; d < p.dim; ++d) to[d] = number(row[d]);
    }
}

template <typename T>
static void write_results(const Paged& p, int64_t sequence, int64_t head, int64_t first, int64_t count,
                          const float* from, const float* totals) {
  T* const out = static_cast<T*>(p.out);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t g = 0; g < group(p); ++g, from += up(p.value_dim), ++totals) {
      T* const row = out + (((sequence * p.fresh + first + i) * p.heads) + head * group(p) + g) * p.value_dim;
      const float by = *totals == 0 ? 0 : 1 / *totals;
      for (int64_t d = 0; d < p.value_dim; ++d) put(row + d, from[d] * by);
    }
}

// Scores of a query's row become weights; its best score, its total and its result follow.
static void weigh(const Paged& p, Block b, int64_t at, float* scores, float* best, float* total, float* out) {
  const int64_t low = p.window > 0 ? most(at - p.window + 1, 0) : 0;
  const float cap = p.softcap, scale = p.scale;
  // In base 2, so that a weight is a power of two.
  const Vec factor = splat(cap > 0 ? scale / cap : scale * kLog2E), back = splat(cap * kLog2E);
  Vec high = splat(kFloor);
  for (int64_t j = 0; j < b.count; j += kWidth) {
    Vec s = load(scores + j) * factor;
    if (cap > 0) s = tanh(s) * back;
    if (b.first + j < low || b.first + j + kWidth - 1 > at || j + kWidth > b.count) {
      const IntVec place = lanes() + int32_t(b.first + j);
      const IntVec seen = (place >= int32_t(low)) & (place <= int32_t(at)) & (lanes() + int32_t(j) < int32_t(b.count));
      s = select(seen, s, splat(kHidden));
    }
    store(scores + j, s);
    high = max(high, s);
  }
  const float top = max_across(high), now = top > *best || top != top ? top : *best;
  const float shrink = exp2(splat(*best - now))[0];
  Vec sums{};
  for (int64_t j = 0; j < b.count; j += kWidth) {
    const Vec weight = exp2(load(scores + j) - splat(now));
    store(scores + j, weight);
    sums += weight;
  }
  *best = now;
  *total = *total * shrink + sum(sums);
  if (shrink != 1)
    for (int64_t d = 0; d < up(p.value_dim); d += kWidth) store(out + d, load(out + d) * splat(shrink));
}

// Of few rows packing would take longer than all else: keys and values are read where they lie.
constexpr int64_t kFewRows = 8;
constexpr int kAbreast = kWidth >= 16 ? 4 : 2;  // vectors of a value whose sums are in registers

// Where a block's positions lie in a pool.
template <typename T>
static void find_rows(const Paged& p, const void* pool, int64_t width, int64_t sequence, int64_t head, Block b,
                      const T** to) {
  for (int64_t j = 0; j < b.count;) {
    const int64_t in_page = least(p.page_size - (b.first + j) % p.page_size, b.count - j);
    const T* row = row_of(p, static_cast<const T*>(pool), width, sequence, head, b.first + j);
    for (int64_t l = 0; l < in_page; ++l, ++j, row += p.kv_heads * width) to[j] = row;
  }
}

template <typename T>
static inline __attribute__((always_inline)) void fetch(const T* const* rows, int64_t count, int64_t size) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t d = 0; d < size; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(rows[j] + d);
}

// Lane l of the result is the sum of rows[l]: a transposition whose halves are added at each of its steps.
static inline __attribute__((always_inline)) Vec sums_of(Vec rows[kWidth]) {
#pragma GCC unroll 4
  for (int s = 1; s < kWidth; s *= 2) {
    const IntVec high = lanes() & s;
    const IntVec even = high ? lanes() + (kWidth - s) : lanes(), odd = high ? lanes() + kWidth : lanes() + s;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i += 2 * s) rows[i] = pick(rows[i], rows[i | s], even) + pick(rows[i], rows[i | s], odd);
  }
  return rows[0];
}

// Scores of R rows of queries with the keys of a block.
template <int R, typename T>
static void score(const Paged& p, const T* const* keys, const T* const* values, int64_t count, const float* query,
                  float* scores) {
  for (int64_t j = 0; j < count; j += kWidth) {
    const int64_t there = least(count - j, kWidth);
    fetch(keys + j + there, least(count - j - there, kWidth), p.dim);
    Vec parts[R][kWidth];
    for (int64_t l = 0; l < kWidth; ++l) {
      Vec sums[R] = {};
      if (l < there) {
        const T* const key = keys[j + l];
        for (int64_t d = 0; d < p.dim; d += kWidth) {
          const Vec part = load(key + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sums[r] += load(query + r * p.dim + d) * part;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) parts[r][l] = sums[r];
    }
    fetch(values + j, there, p.value_dim);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(scores + r * kPitch + j, sums_of(parts[r]));
  }
}

// Adds a block's values, C vectors of them from one place on, to the results of R rows.
template <int R, int C, typename T>
static inline __attribute__((always_inline)) void add_values(const T* const* values, int64_t count, int64_t d,
                                                             const float* weights, float* out, int64_t wide) {
  Vec total[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[r][c] = load(out + r * wide + d + c * kWidth);
  for (int64_t j = 0; j < count; ++j) {
    Vec value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = load(values[j] + d + c * kWidth);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kPitch + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) total[r][c] += weight * value[c];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(out + r * wide + d + c * kWidth, total[r][c]);
}

template <int R, typename T>
static void attend_rows(const Paged& p, const T* const* keys, const T* const* values, Block b, int64_t at, int64_t r,
                        const float* query, float* scores, float* best, float* total, float* out) {
  const int64_t wide = up(p.value_dim);
  score<R>(p, keys, values, b.count, query + r * p.dim, scores);
  for (int64_t i = 0; i < R; ++i)
    weigh(p, b, at + (r + i) / group(p), scores + i * kPitch, best + r + i, total + r + i, out + (r + i) * wide);
  int64_t d = 0;
  for (; d + kAbreast * kWidth <= wide; d += kAbreast * kWidth)
    add_values<R, kAbreast>(values, b.count, d, scores, out + r * wide, wide);
  for (; d < wide; d += kWidth) add_values<R, 1>(values, b.count, d, scores, out + r * wide, wide);
}

template <typename T>
static void attend_few(const Paged& p, int64_t sequence, int64_t head, Block b, int64_t at, int64_t rows,
                       const float* query, float* scores, float* best, float* total, float* out) {
  const T *keys[kBlock], *values[kBlock];
  find_rows(p, p.keys, p.key_width, sequence, head, b, keys);
  find_rows(p, p.values, p.value_width, sequence, head, b, values);
  fetch(keys, least(b.count, kWidth), p.dim);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) attend_rows<4>(p, keys, values, b, at, r, query, scores, best, total, out);
  if (r + 3 == rows) attend_rows<3>(p, keys, values, b, at, r, query, scores, best, total, out);
  if (r + 2 == rows) attend_rows<2>(p, keys, values, b, at, r, query, scores, best, total, out);
  if (r + 1 == rows) attend_rows<1>(p, keys, values, b, at, r, query, scores, best, total, out);
}

static void attend(const Paged& p, int64_t item, float* scratch) {
  const int64_t share = queries(p), chunks = parts(p.fresh, share);
  const int64_t sequence = item / (p.kv_heads * chunks), head = item / chunks % p.kv_heads;
  const int64_t first = item % chunks * share, count = least(share, p.fresh - first), rows = count * group(p);
  const int64_t wide = up(p.value_dim);
  const auto next = [&](int64_t floats) {
    float* const here = scratch;
    scratch += parts(floats, 16) * 16;
    return here;
  };
  float* const query = next(rows * p.dim);
  float* const out = next(rows * wide);
  float* const scores = next(rows * kPitch);
  float* const keys = next(p.dim * kPitch);
  float* const values = next(kBlock * wide);
  float* const best = next(rows);
  float* const total = next(rows);
  for (int64_t r = 0; r < rows; ++r) {
    // A sink is a score without a value; scores are in base 2.
    const float sink = p.sinks ? p.sinks[head * group(p) + r % group(p)] * kLog2E : kHidden;
    best[r] = sink < kFloor ? kFloor : sink;
    total[r] = sink < kFloor ? 0 : 1;
  }
  for (int64_t i = 0; i < rows * wide; ++i) out[i] = 0;
  const int64_t length = p.lengths[sequence];
  const int64_t begin = length - p.fresh + first;  // of the first query, which may lie before the sequence
  const int64_t end = least(least(begin + count, length), p.table * p.page_size);
  const int64_t start = p.window > 0 ? most(begin - p.window + 1, 0) : 0;
  p.narrow_query ? read_queries<uint16_t>(p, sequence, head, first, count, query)
                 : read_queries<float>(p, sequence, head, first, count, query);
  const bool few = rows <= kFewRows && p.dim % kWidth == 0 && p.value_dim % kWidth == 0 &&
                   p.narrow_key == p.narrow_value;
  for (Block b{start, 0}; b.first < end; b.first += b.count) {
    b.count = least(kBlock, end - b.first);
    if (few) {
      p.narrow_key ? attend_few<uint16_t>(p, sequence, head, b, begin, rows, query, scores, best, total, out)
                   : attend_few<float>(p, sequence, head, b, begin, rows, query, scores, best, total, out);
      continue;
    }
    p.narrow_key ? pack_keys<uint16_t>(p, sequence, head, b, keys) : pack_keys<float>(p, sequence, head, b, keys);
    p.narrow_value ? pack_values<uint16_t>(p, sequence, head, b, values)
                   : pack_values<float>(p, sequence, head, b, values);
    product(rows, up(b.count), p.dim, query, p.dim, 1, keys, kPitch, scores, kPitch, false);
    for (int64_t r = 0; r < rows; ++r)
      weigh(p, b, begin + r / group(p), scores + r * kPitch, best + r, total + r, out + r * wide);
    product(rows, wide, b.count, scores, kPitch, 1, values, wide, out, wide, true);
  }
  p.narrow_query ? write_results<uint16_t>(p, sequence, head, first, count, out, total)
                 : write_results<float>(p, sequence, head, first, count, out, total);
}

extern const capibara::PagedKernels kPaged;
const capibara::PagedKernels kPaged = {paged_items, paged_scratch, attend};

}  // namespace CAPIBARA_ISA

// Softmax attention, forward and backward, for one instruction set.
//
// The method is FlashAttention (Dao et al. 2022, arXiv:2205.14135; the loop order of Dao 2023,
// arXiv:2307.08691): scores live in a tile of kQueryRows x kKeys that stays in the first-level cache, and are
// computed again in the backward pass. All five products of the backward pass run without a transposed copy of
// a tile: `product` reads its left operand by broadcasts, which cost the same at any stride.
#include "attention.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Attention;
using capibara::Steps;

constexpr int64_t kKeys = 128;              // keys of a tile
constexpr int64_t kQueryRows = 4 * kRows;   // query rows of a tile
constexpr int64_t kChunk = 512 / kQueryRows * kQueryRows;  // most query rows of one forward item
constexpr float kLog2E = 1.44269504f;
constexpr float kFloor = -1e29f;  // a row whose best score lies below sees no key

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t padded(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void fill_zero(float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = 0;
}

// In the layout [batch, length, heads, dim] a head's rows lie apart, where the processor's own prefetching loses
// the trail: every row would be a wait for memory.
static inline void ask_for_row(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}
constexpr int64_t kAhead = 12;  // rows

// rows [count, dim] -> to [count, padded(dim)], times `factor`; the padding is zero.
static void pack(const float* from, int64_t step, int64_t count, int64_t dim, float factor, float* to) {
  const int64_t wide = padded(dim);
  for (int64_t i = 0; i < count; ++i, from += step, to += wide) {
    if (i + kAhead < count) ask_for_row(from + kAhead * step, dim);
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) store(to + d, load(from + d) * splat(factor));
    for (; d < dim; ++d) to[d] = from[d] * factor;
    for (; d < wide; ++d) to[d] = 0;
  }
}

// rows [count, dim] -> to [dim, kKeys]; the keys past count are zero.
static void pack_transposed(const float* from, int64_t step, int64_t count, int64_t dim, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) ask_for_row(from + (i + kAhead) * step, dim);
    for (int64_t d = 0; d < dim; ++d) to[d * kKeys + i] = from[i * step + d];
  }
  if (count < kKeys)
    for (int64_t d = 0; d < dim; ++d) fill_zero(to + d * kKeys + count, kKeys - count);
}

static void unpack(const float* from, int64_t count, int64_t dim, float factor, float* to, int64_t step) {
  const int64_t wide = padded(dim);
  for (int64_t i = 0; i < count; ++i, from += wide, to += step) {
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) store(to + d, load(from + d) * splat(factor));
    for (; d < dim; ++d) to[d] = from[d] * factor;
  }
}

// The columns of the key block [key, key + count) that some of the rows [row, row + rows) see.
struct Span {
  int64_t first, last;  // from the block's start; first is a multiple of kWidth
  bool whole;           // every row sees every column of it, and its width is a multiple of kWidth
};

static Span visible(const Attention& a, int64_t row, int64_t rows, int64_t key, int64_t count) {
  Span s;
  s.first = most(row - a.left - key, 0) / kWidth * kWidth;
  s.last = least(row + rows - 1 + a.right + 1 - key, count);
  if (s.last <= s.first) return {0, 0, true};
  s.whole = key + s.last - 1 <= row + a.right && key + s.first >= row + rows - 1 - a.left &&
            (s.last - s.first) % kWidth == 0;
  return s;
}

static void hide(const Attention& a, const Span& s, int64_t row, int64_t rows, int64_t key, float* scores) {
  const float hidden = -__builtin_inff();
  const int64_t stop = s.first + padded(s.last - s.first);
  for (int64_t r = 0; r < rows; ++r) {
    float* line = scores + r * kKeys;
    const int64_t from = least(most(row + r - a.left - key, s.first), stop);
    const int64_t to = most(least(row + r + a.right + 1 - key, s.last), from);
    for (int64_t j = s.first; j < from; ++j) line[j] = hidden;
    for (int64_t j = to; j < stop; ++j) line[j] = hidden;
  }
}

// Query rows of a forward item: as many as may be, since every item packs its keys anew; but some items for every
// thread.
static int64_t chunk_rows(const Attention& a) {
  const int64_t others = most(a.batch * a.heads, 1), most_chunks = most(ceil_div(a.q_len, 4 * kQueryRows), 1);
  const int64_t wanted = least(ceil_div(4 * a.threads, others), most_chunks);
  return ceil_div(ceil_div(a.q_len, most(ceil_div(a.q_len, kChunk), wanted)), kQueryRows) * kQueryRows;
}

static int64_t forward_items(const Attention& a) {
  return a.q_len == 0 ? 0 : a.batch * a.heads * ceil_div(a.q_len, chunk_rows(a));
}

static int64_t forward_scratch(const Attention& a) {
  const int64_t dim = padded(a.dim), wide = padded(a.value_dim);
  return kChunk * (dim + wide + 2 * 16) + kKeys * (a.dim + wide) + kQueryRows * kKeys + 64;
}

static void forward(const Attention& a, int64_t item, float* scratch) {
  // The last rows first: under a causal mask they are the most work, and what starts late should be short.
  const int64_t size = chunk_rows(a), chunks = ceil_div(a.q_len, size);
  const int64_t chunk = chunks - 1 - item / (a.batch * a.heads);
  const int64_t b = item % (a.batch * a.heads) / a.heads, h = item % a.heads;
  const int64_t kv = h / (a.heads / a.kv_heads);
  const int64_t first = chunk * size, count = least(size, a.q_len - first);
  const int64_t dim = padded(a.dim), wide = padded(a.value_dim);
  float* query = scratch;
  float* out = query + kChunk * dim;
  float* best = out + kChunk * wide;
  float* total = best + kChunk;
  float* keys = total + kChunk;
  float* values = keys + kKeys * a.dim;
  float* scores = values + kKeys * wide;

  pack(a.query + b * a.query_steps.batch + h * a.query_steps.head + first * a.query_steps.position,
       a.query_steps.position, count, a.dim, a.scale * kLog2E, query);
  fill_zero(out, count * wide);
  for (int64_t i = 0; i < count; ++i) best[i] = kFloor, total[i] = 0;

  const float* key = a.key + b * a.key_steps.batch + kv * a.key_steps.head;
  const float* value = a.value + b * a.value_steps.batch + kv * a.value_steps.head;
  const int64_t start = most(first - a.left, 0) / kKeys * kKeys;
  const int64_t stop = least(first + count + a.right, a.kv_len);
  for (int64_t j = start; j < stop; j += kKeys) {
    const int64_t n = least(kKeys, a.kv_len - j);
    pack_transposed(key + j * a.key_steps.position, a.key_steps.position, n, a.dim, keys);
    pack(value + j * a.value_steps.position, a.value_steps.position, n, a.value_dim, 1.0f, values);
    fill_zero(values + n * wide, (kKeys - n) * wide);
    for (int64_t i = 0; i < count; i += kQueryRows) {
      const int64_t rows = least(kQueryRows, count - i);
      const Span s = visible(a, first + i, rows, j, n);
      if (s.last <= s.first) continue;
      const int64_t width = padded(s.last - s.first);
      product(rows, width, a.dim, query + i * dim, dim, 1, keys + s.first, kKeys, scores + s.first, kKeys, false);
      if (!s.whole) hide(a, s, first + i, rows, j, scores);
      for (int64_t r = 0; r < rows; ++r) {
        float* line = scores + r * kKeys + s.first;
        Vec top = load(line);
        for (int64_t c = kWidth; c < width; c += kWidth) top = max(top, load(line + c));
        const float old = best[i + r], high = max_across(top);
        const float now = high > old ? high : old;
        Vec added = {};
        for (int64_t c = 0; c < width; c += kWidth) {
          const Vec p = exp2(load(line + c) - splat(now));
          store(line + c, p);
          added += p;
        }
        if (now != old) {
          const Vec shrink = exp2(splat(old - now));
          total[i + r] *= shrink[0];
          for (int64_t d = 0; d < wide; d += kWidth) store(out + (i + r) * wide + d, load(out + (i + r) * wide + d) * shrink);
          best[i + r] = now;
        }
        total[i + r] += sum(added);
      }
      product(rows, wide, width, scores + s.first, kKeys, 1, values + s.first * wide, wide, out + i * wide, wide, true);
    }
  }

  float* to = a.out + b * a.out_steps.batch + h * a.out_steps.head + first * a.out_steps.position;
  float* stat = a.stat + (b * a.heads + h) * a.q_len + first;
  for (int64_t i = 0; i < count; ++i) {
    // A row that sees no key gives zeros here, and weights of 2^-inf in the backward pass.
    const bool none = total[i] == 0;
    unpack(out + i * wide, 1, a.value_dim, none ? 0.0f : 1.0f / total[i], to + i * a.out_steps.position, 0);
    stat[i] = none ? __builtin_inff() : best[i] + __builtin_log2f(total[i]);
  }
}

static int64_t backward_items(const Attention& a) { return a.batch * a.kv_heads; }

static int64_t backward_scratch(const Attention& a) {
  const int64_t dim = padded(a.dim), wide = padded(a.value_dim);
  return a.q_len * (2 * dim + wide + 1) + (a.kv_len + kKeys) * (dim + wide) +
         kKeys * (a.dim + a.value_dim + dim) + 2 * kQueryRows * kKeys + 64;
}

static void backward(const Attention& a, int64_t item, float* scratch) {
  const int64_t b = item / a.kv_heads, kv = item % a.kv_heads, group = a.heads / a.kv_heads;
  const int64_t dim = padded(a.dim), wide = padded(a.value_dim);
  float* query = scratch;
  float* query_grad = query + a.q_len * dim;
  float* out_grad = query_grad + a.q_len * dim;
  float* delta = out_grad + a.q_len * wide;
  float* key_grad = delta + a.q_len;
  float* value_grad = key_grad + (a.kv_len + kKeys) * dim;
  float* keys = value_grad + (a.kv_len + kKeys) * wide;  // [dim, kKeys]
  float* values = keys + kKeys * a.dim;                  // [value_dim, kKeys]
  float* key_rows = values + kKeys * a.value_dim;        // [kKeys, dim]
  float* weights = key_rows + kKeys * dim;
  float* grads = weights + kQueryRows * kKeys;

  fill_zero(key_grad, (a.kv_len + kKeys) * dim);
  fill_zero(value_grad, (a.kv_len + kKeys) * wide);
  const float* key = a.key + b * a.key_steps.batch + kv * a.key_steps.head;
  const float* value = a.value + b * a.value_steps.batch + kv * a.value_steps.head;
  for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    const float* stat = a.stat + (b * a.heads + h) * a.q_len;
    const float* from = a.out_grad + b * a.out_steps.batch + h * a.out_steps.head;
    const float* out = a.out + b * a.out_steps.batch + h * a.out_steps.head;
    pack(a.query + b * a.query_steps.batch + h * a.query_steps.head, a.query_steps.position, a.q_len, a.dim,
         a.scale * kLog2E, query);
    pack(from, a.out_steps.position, a.q_len, a.value_dim, 1.0f, out_grad);
    for (int64_t i = 0; i < a.q_len; ++i) {
      float total = 0;
      for (int64_t d = 0; d < a.value_dim; ++d) total += from[i * a.out_steps.position + d] * out[i * a.out_steps.position + d];
      delta[i] = total;
    }
    fill_zero(query_grad, a.q_len * dim);
    for (int64_t j = 0; j < a.kv_len; j += kKeys) {
      const int64_t n = least(kKeys, a.kv_len - j);
      // Rows that see something of this block.
      const int64_t first = most(j - a.right, 0) / kQueryRows * kQueryRows;
      const int64_t stop = least(j + n + a.left, a.q_len);
      if (first >= stop) continue;
      pack_transposed(key + j * a.key_steps.position, a.key_steps.position, n, a.dim, keys);
      pack_transposed(value + j * a.value_steps.position, a.value_steps.position, n, a.value_dim, values);
      pack(key + j * a.key_steps.position, a.key_steps.position, n, a.dim, 1.0f, key_rows);
      fill_zero(key_rows + n * dim, (kKeys - n) * dim);
      for (int64_t i = first; i < stop; i += kQueryRows) {
        const int64_t rows = least(kQueryRows, a.q_len - i);
        const Span s = visible(a, i, rows, j, n);
        if (s.last <= s.first) continue;
        const int64_t width = padded(s.last - s.first);
        float* weight = weights + s.first;
        float* grad = grads + s.first;
        product(rows, width, a.dim, query + i * dim, dim, 1, keys + s.first, kKeys, weight, kKeys, false);
        if (!s.whole) hide(a, s, i, rows, j, weights);
        product(rows, width, a.value_dim, out_grad + i * wide, wide, 1, values + s.first, kKeys, grad, kKeys, false);
        for (int64_t r = 0; r < rows; ++r) {
          const Vec high = splat(stat[i + r]), shift = splat(delta[i + r]);
          for (int64_t c = r * kKeys; c < r * kKeys + width; c += kWidth) {
            const Vec p = exp2(load(weight + c) - high);
            store(weight + c, p);
            store(grad + c, p * (load(grad + c) - shift));
          }
        }
        const int64_t at = j + s.first;
        product(width, wide, rows, weight, 1, kKeys, out_grad + i * wide, wide, value_grad + at * wide, wide, true);
        product(width, dim, rows, grad, 1, kKeys, query + i * dim, dim, key_grad + at * dim, dim, true);
        product(rows, dim, width, grad, kKeys, 1, key_rows + s.first * dim, dim, query_grad + i * dim, dim, true);
      }
    }
    unpack(query_grad, a.q_len, a.dim, a.scale, a.query_grad + b * a.query_steps.batch + h * a.query_steps.head,
           a.query_steps.position);
  }
  // The packed query carries scale * log2(e); only the scale belongs to the key's gradient.
  unpack(key_grad, a.kv_len, a.dim, 1.0f / kLog2E, a.key_grad + b * a.key_steps.batch + kv * a.key_steps.head,
         a.key_steps.position);
  unpack(value_grad, a.kv_len, a.value_dim, 1.0f, a.value_grad + b * a.value_steps.batch + kv * a.value_steps.head,
         a.value_steps.position);
}

#define CAPIBARA_TEXT_(x) #x
#define CAPIBARA_TEXT(x) CAPIBARA_TEXT_(x)
extern const capibara::AttentionKernels kAttention;
const capibara::AttentionKernels kAttention = {CAPIBARA_TEXT(CAPIBARA_ISA), forward_items, forward_scratch, forward,
                                               backward_items, backward_scratch, backward};

}  // namespace CAPIBARA_ISA

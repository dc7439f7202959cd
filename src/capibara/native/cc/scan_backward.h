// The gradient of the selective scan.
//
// With h[t] = d[t] h[t-1] + dt[t] x[t] b[t], y[t] = h[t] c[t] and g[t] what the result changes by for h[t],
//
//   g[t] = y'[t] c[t] + d[t+1] g[t+1],   c'[t] = sum_p y'[t] h[t],   b'[t] = dt[t] sum_p x[t] g[t],   s[t] = sum_n g[t] b[t],
//   x'[t] = dt[t] s[t],   dt'[t] = sum_p x[t] s[t] + a q[t],   a' = sum_t dt[t] q[t],   q[t] = d[t] <g[t], h[t-1]>.
//
// States are not read but computed again: those that blocks of positions begin with by a first pass over the sequence,
// the others block by block from the last to the first. A tile of the state (two rows, two vectors of each) goes through
// a whole block forward and backward before the next one, so that all states which it takes stay in the first-level
// cache and it itself in registers. No product of decays is ever inverted: nothing overflows that does not in the loop.
#pragma once

#include "scan.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::SelectiveGradient;

constexpr int64_t kSpan = 64;  // positions of a block
constexpr int64_t kApart = 80;  // between arrays, so that what is used together lies in different sets of a cache
constexpr int64_t kTile = 2 * kWidth;

static int64_t padded_states(const SelectiveGradient& s) { return (s.states + kTile - 1) / kTile * kTile; }
static int64_t spans(const SelectiveGradient& s) { return (s.length + kSpan - 1) / kSpan; }

// A block of positions of one head, as the tiles read it. Arrays of states are [tile of states][position][kTile].
struct Block {
  int64_t count;
  float *b, *c, *b_grad, *c_grad;
  float *x, *push, *y_grad, *x_grad;  // [width][kSpan]; push is dt x
  float *dt, *decay, *dt_grad;        // [kSpan]
  float* q;                           // [kSpan] vectors, to be summed across
  float* history;                     // [kSpan + 1] tiles of two rows
  float* sums;                        // [2][kSpan] vectors, to be summed across
};

static void pack_states(const float* from, int64_t step, int64_t count, int64_t states, float* to) {
  for (int64_t n = 0; n < states; n += kTile, to += kSpan * kTile)
    for (int64_t t = 0; t < count; ++t) {
      const float* row = from + t * step + n;
      float* at = to + t * kTile;
      if (n + kTile <= states) {
        store(at, load(row));
        store(at + kWidth, load(row + kWidth));
      } else {
        for (int64_t l = 0; l < kTile; ++l) at[l] = n + l < states ? row[l] : 0;
      }
    }
}

static void unpack_states(const float* from, int64_t step, int64_t count, int64_t states, bool add,
                          float* to) {
  for (int64_t n = 0; n < states; n += kTile, from += kSpan * kTile)
    for (int64_t t = 0; t < count; ++t) {
      const float* row = from + t * kTile;
      float* at = to + t * step + n;
      if (n + kTile <= states) {
        for (int64_t l = 0; l < kTile; l += kWidth) {
          const Vec x = load(row + l);
          store(at + l, add ? load(at + l) + x : x);
        }
      } else {
        for (int64_t l = 0; n + l < states; ++l) at[l] = add ? at[l] + row[l] : row[l];
      }
    }
}

// Lanes of the last tile that are states: what fills it up must stay 0, whatever it is multiplied by.
struct Lanes {
  IntVec in[2];
};
template <bool kRagged>
static inline Vec within(Vec x, IntVec lanes) {
  return kRagged ? (Vec)((IntVec)x & lanes) : x;
}

// `rows` of the state through a block; kKeep: the state before each position and after the last one go to the history.
template <int kCount, bool kRagged, bool kKeep>
static inline void tile_forward(const Block& k, int64_t tile, int64_t row, const Lanes& lanes, const float* from,
                                float* to, int64_t wide) {
  Vec h[kCount][2];
  for (int r = 0; r < kCount; ++r)
    for (int v = 0; v < 2; ++v) h[r][v] = load(from + r * wide + v * kWidth);
  // Copied: what is stored could be the block itself for all that the compiler knows.
  const float *b = k.b + tile * kSpan * kTile, *push = k.push + row * kSpan, *decays = k.decay;
  float* history = k.history;
  const int64_t count = k.count;
  for (int64_t t = 0; t < count; ++t, b += kTile) {
    const Vec decay = splat(decays[t]), write[2] = {load(b), load(b + kWidth)};
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const Vec x = splat(push[r * kSpan + t]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if (kKeep) store(history, h[r][v]), history += kWidth;
        h[r][v] = within<kRagged>(h[r][v] * decay + x * write[v], lanes.in[v]);
      }
    }
  }
  for (int r = 0; r < kCount; ++r)
    for (int v = 0; v < 2; ++v) {
      if (kKeep)
        store(history, h[r][v]), history += kWidth;
      else
        store(to + r * wide + v * kWidth, h[r][v]);
    }
}

// The same rows backward, over the history; `carry` is d[t] g[t] of the position after the block, then of its first.
template <int kCount, bool kRagged, bool kFirst>
static inline void tile_backward(const Block& k, int64_t tile, int64_t row, const Lanes& lanes, float* carry,
                                 int64_t wide) {
  Vec g[kCount][2];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) g[r][v] = load(carry + r * wide + v * kWidth);
  const int64_t last = k.count - 1, at = tile * kSpan * kTile + last * kTile;
  const float *push = k.push + row * kSpan, *y_grad = k.y_grad + row * kSpan, *decays = k.decay;
  const float *b = k.b + at, *c = k.c + at, *before = k.history + last * kCount * kTile;
  float *b_grads = k.b_grad + at, *c_grads = k.c_grad + at, *qs = k.q, *sums = k.sums;
  for (int64_t t = last; t >= 0; --t) {
    const Vec decay = splat(decays[t]);
    Vec q = load(qs + t * kWidth);
    Vec b_grad[2] = {load(b_grads), load(b_grads + kWidth)}, c_grad[2] = {load(c_grads), load(c_grads + kWidth)};
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const Vec added = splat(push[r * kSpan + t]), wanted = splat(y_grad[r * kSpan + t]);
      float* sum = sums + (r * kSpan + t) * kWidth;
      Vec s[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const float* state = before + r * kTile + v * kWidth;  // and the state after it a step further
        const Vec all = within<kRagged>(g[r][v] + wanted * load(c + v * kWidth), lanes.in[v]);
        s[v] = all * load(b + v * kWidth);
        b_grad[v] += all * added;
        c_grad[v] += load(state + kCount * kTile) * wanted;
        g[r][v] = within<kRagged>(all * decay, lanes.in[v]);
        q += g[r][v] * load(state);
      }
      store(sum, kFirst ? s[0] + s[1] : load(sum) + (s[0] + s[1]));
    }
    for (int v = 0; v < 2; ++v) store(b_grads + v * kWidth, b_grad[v]), store(c_grads + v * kWidth, c_grad[v]);
    store(qs + t * kWidth, q);
    b -= kTile, c -= kTile, b_grads -= kTile, c_grads -= kTile, before -= kCount * kTile;
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(carry + r * wide + v * kWidth, g[r][v]);
}

// The sums across of kWidth vectors, one after the other in memory: each step leaves half as many.
static inline Vec sums_across(const float* from) {
  Vec rows[kWidth];
#pragma GCC unroll 16
  for (int l = 0; l < kWidth; ++l) rows[l] = load(from + l * kWidth);
#pragma GCC unroll 4
  for (int s = 1; s < kWidth; s *= 2) {
    const IntVec second = (lanes() & s) != 0;
#pragma GCC unroll 16
    for (int l = 0; l < kWidth; l += 2 * s) {
      const Vec a = rows[l] + pick(rows[l], rows[l], lanes() ^ s);
      const Vec b = rows[l + s] + pick(rows[l + s], rows[l + s], lanes() ^ s);
      rows[l] = select(second, b, a);
    }
  }
  return rows[0];
}

template <int kCount>
static void rows_forward(const SelectiveGradient& s, const Block& k, int64_t row, const Lanes& lanes, const float* from,
                         float* to) {
  const int64_t wide = padded_states(s);
  for (int64_t n = 0; n < wide; n += kTile) {
    const int64_t at = row * wide + n;
    (n + kTile > s.states ? tile_forward<kCount, true, false> : tile_forward<kCount, false, false>)(
        k, n / kTile, row, lanes, from + at, to + at, wide);
  }
}

template <int kCount>
static void rows_backward(const SelectiveGradient& s, const Block& k, int64_t row, const Lanes& lanes,
                          const float* from, float* carry) {
  const int64_t wide = padded_states(s);
  for (int64_t n = 0; n < wide; n += kTile) {
    const int64_t at = row * wide + n;
    const int64_t tile = n / kTile;
    const bool ragged = n + kTile > s.states;
    (ragged ? tile_forward<kCount, true, true> : tile_forward<kCount, false, true>)(k, tile, row, lanes, from + at,
                                                                                    nullptr, wide);
    if (tile == 0)
      (ragged ? tile_backward<kCount, true, true> : tile_backward<kCount, false, true>)(k, 0, row, lanes, carry + at,
                                                                                        wide);
    else
      (ragged ? tile_backward<kCount, true, false> : tile_backward<kCount, false, false>)(k, tile, row, lanes,
                                                                                          carry + at, wide);
  }
  for (int r = 0; r < kCount; ++r)
    for (int64_t t = 0; t < k.count; t += kWidth) {
      const int64_t at = (row + r) * kSpan + t;
      const Vec sum = sums_across(k.sums + (r * kSpan + t) * kWidth);
      store(k.x_grad + at, sum * load(k.dt + t));
      store(k.dt_grad + t, load(k.dt_grad + t) + sum * load(k.x + at));
    }
}

// [count][width], rows `step` apart, to [width][kSpan].
static void turn(const float* from, int64_t step, int64_t count, int64_t width, float* to) {
  int64_t t = 0;
  for (; t + kWidth <= count; t += kWidth) {
    int64_t p = 0;
    for (; p + kWidth <= width; p += kWidth) {
      Vec rows[kWidth];
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) rows[l] = load(from + (t + l) * step + p);
      transpose(rows);
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) store(to + (p + l) * kSpan + t, rows[l]);
    }
    for (; p < width; ++p)
      for (int64_t l = t; l < t + kWidth; ++l) to[p * kSpan + l] = from[l * step + p];
  }
  for (; t < count; ++t)
    for (int64_t p = 0; p < width; ++p) to[p * kSpan + t] = from[t * step + p];
}

// The way back.
static void turn_back(const float* from, int64_t count, int64_t width, float* to, int64_t step) {
  int64_t t = 0;
  for (; t + kWidth <= count; t += kWidth) {
    int64_t p = 0;
    for (; p + kWidth <= width; p += kWidth) {
      Vec rows[kWidth];
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) rows[l] = load(from + (p + l) * kSpan + t);
      transpose(rows);
#pragma GCC unroll 16
      for (int l = 0; l < kWidth; ++l) store(to + (t + l) * step + p, rows[l]);
    }
    for (; p < width; ++p)
      for (int64_t l = t; l < t + kWidth; ++l) to[l * step + p] = from[p * kSpan + l];
  }
  for (; t < count; ++t)
    for (int64_t p = 0; p < width; ++p) to[t * step + p] = from[p * kSpan + t];
}

static void clear(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = 0;
}

// Some neighbouring heads of a group, `count` of them: where their arrays are.
struct Heads {
  int64_t count;
  int64_t x_step, step;  // from one position to the next, of x and of b
  const float *x, *dt, *b, *c, *y_grad;
};

// So many that what they read of a position is long: a row that is short and far from the next one is read slowly.
constexpr int64_t kMost = 16;
static int64_t heads_at_once(const SelectiveGradient& s) {
  const int64_t wanted = (256 + s.width - 1) / s.width, heads = s.heads / s.groups;
  const int64_t n = wanted < kMost ? wanted : kMost;
  return n < heads ? n : heads;
}

static int64_t gradient_items(const SelectiveGradient& s) { return s.outer * s.batch * s.groups * s.parts; }
static int64_t gradient_scratch(const SelectiveGradient& s) {
  const int64_t wide = padded_states(s);
  return heads_at_once(s) * (spans(s) + 1) * s.width * wide + 4 * kSpan * wide + 4 * kSpan * s.width +
         (kSpan + 1) * 2 * kTile + 3 * kSpan * kWidth + 3 * kSpan + 7 * kApart;
}

static void take_states(const SelectiveGradient& s, const Heads& h, int64_t begin, bool backward, Block& k) {
  k.count = s.length - begin < kSpan ? s.length - begin : kSpan;
  pack_states(h.b + begin * h.step, h.step, k.count, s.states, k.b);
  if (!backward) return;
  pack_states(h.c + begin * h.step, h.step, k.count, s.states, k.c);
  clear(k.b_grad, kSpan * padded_states(s));
  clear(k.c_grad, kSpan * padded_states(s));
}

static void take_head(const SelectiveGradient& s, const Heads& h, int64_t head, float rate, int64_t begin, bool backward,
                      Block& k) {
  const float bits = rate * 1.44269504f, *dt = h.dt + begin * s.heads + head;
  for (int64_t t = 0; t < kSpan; ++t) {
    k.dt[t] = t < k.count ? dt[t * s.heads] : 0;
    k.decay[t] = k.dt[t] * bits;
  }
  for (int64_t t = 0; t < kSpan; t += kWidth) {
    const Vec power = load(k.decay + t), most = splat(126.0f);
    // Growth in two halves, for what exp2 does not take in one; what is left out overflows in any case.
    const Vec over = power - most, rest = over > 0 ? (over > most ? most : over) : (Vec){};
    store(k.decay + t, exp2(power > most ? most : power) * exp2(rest));
  }
  const int64_t at = begin * h.x_step + head * s.width;
  turn(h.x + at, h.x_step, k.count, s.width, k.x);
  for (int64_t p = 0; p < s.width; ++p)
    for (int64_t t = 0; t < k.count; t += kWidth)
      store(k.push + p * kSpan + t, load(k.x + p * kSpan + t) * load(k.dt + t));
  if (!backward) return;
  turn(h.y_grad + at, h.x_step, k.count, s.width, k.y_grad);
  clear(k.q, kSpan * kWidth);
  clear(k.dt_grad, kSpan);
}

static void heads_gradient(const SelectiveGradient& s, int64_t element, int64_t head, int64_t count, bool add,
                           float* b_grad, float* c_grad, float* scratch) {
  const int64_t wide = padded_states(s), size = s.width * wide, blocks = spans(s), group = head / (s.heads / s.groups);
  float* starts = scratch;  // [blocks, heads, width, wide]
  float* carry = starts + blocks * count * size;
  Block k;
  k.b = carry + count * size;
  k.c = k.b + kSpan * wide + kApart;
  k.b_grad = k.c + kSpan * wide + kApart;
  k.c_grad = k.b_grad + kSpan * wide + kApart;
  k.x = k.c_grad + kSpan * wide + kApart;
  k.push = k.x + kSpan * s.width + kApart;
  k.y_grad = k.push + kSpan * s.width + kApart;
  k.x_grad = k.y_grad + kSpan * s.width + kApart;
  k.history = k.x_grad + kSpan * s.width;
  k.sums = k.history + (kSpan + 1) * 2 * kTile;
  k.q = k.sums + 2 * kSpan * kWidth;
  k.dt = k.q + kSpan * kWidth;
  k.decay = k.dt + kSpan;
  k.dt_grad = k.decay + kSpan;

  Heads h;
  h.count = count;
  h.x_step = s.heads * s.width, h.step = s.groups * s.states;
  const int64_t x_at = element * s.length * h.x_step + head * s.width;
  const int64_t b_at = element * s.length * h.step + group * s.states, dt_at = element * s.length * s.heads + head;
  h.x = s.x + x_at, h.y_grad = s.y_grad + x_at;
  h.b = s.b + b_at, h.c = s.c + b_at;
  h.dt = s.dt + dt_at;
  const float* rates = s.a + element / s.batch * s.heads + head;
  double rate_grads[kMost] = {};
  Lanes lanes;
  for (int v = 0; v < 2; ++v) lanes.in[v] = CAPIBARA_ISA::lanes() + int32_t(wide - kTile + v * kWidth) < int32_t(s.states);

  const int64_t state_at = (element * s.heads + head) * s.width * s.states;
  for (int64_t p = 0; p < count * s.width; ++p)
    for (int64_t n = 0; n < wide; ++n) {
      const bool in = n < s.states;
      starts[p * wide + n] = in ? s.first[state_at + p * s.states + n] : 0;
      carry[p * wide + n] = in ? s.last_grad[state_at + p * s.states + n] : 0;
    }
  for (int64_t i = 0; i + 1 < blocks; ++i) {
    take_states(s, h, i * kSpan, false, k);
    for (int64_t j = 0; j < count; ++j) {
      take_head(s, h, j, rates[j], i * kSpan, false, k);
      const float* from = starts + (i * count + j) * size;
      float* to = starts + ((i + 1) * count + j) * size;
      int64_t p = 0;
      for (; p + 4 <= s.width; p += 4) rows_forward<4>(s, k, p, lanes, from, to);
      for (; p < s.width; ++p) rows_forward<1>(s, k, p, lanes, from, to);
    }
  }
  for (int64_t i = blocks; i-- > 0;) {
    const int64_t begin = i * kSpan;
    take_states(s, h, begin, true, k);
    for (int64_t j = 0; j < count; ++j) {
      take_head(s, h, j, rates[j], begin, true, k);
      const float* from = starts + (i * count + j) * size;
      int64_t p = 0;
      for (; p + 2 <= s.width; p += 2) rows_backward<2>(s, k, p, lanes, from, carry + j * size);
      for (; p < s.width; ++p) rows_backward<1>(s, k, p, lanes, from, carry + j * size);
      for (int64_t t = 0; t < k.count; t += kWidth) store(k.q + t, sums_across(k.q + t * kWidth));
      for (int64_t t = 0; t < k.count; ++t) {
        s.dt_grad[dt_at + j + (begin + t) * s.heads] = k.dt_grad[t] + rates[j] * k.q[t];
        rate_grads[j] += double(k.dt[t]) * k.q[t];
      }
      turn_back(k.x_grad, k.count, s.width, s.x_grad + x_at + j * s.width + begin * h.x_step, h.x_step);
    }
    unpack_states(k.b_grad, h.step, k.count, s.states, add, b_grad + b_at + begin * h.step);
    unpack_states(k.c_grad, h.step, k.count, s.states, add, c_grad + b_at + begin * h.step);
  }
  for (int64_t j = 0; j < count; ++j) s.a_grad[element * s.heads + head + j] = float(rate_grads[j]);
  for (int64_t p = 0; p < count * s.width; ++p)
    for (int64_t n = 0; n < s.states; ++n) s.first_grad[state_at + p * s.states + n] = carry[p * wide + n];
}

// An item is some of the heads of a group: they share the gradients of b and c.
static void gradient(const SelectiveGradient& s, int64_t item, float* scratch) {
  const int64_t part = item % s.parts, group = item / s.parts % s.groups, element = item / s.parts / s.groups;
  const int64_t heads = s.heads / s.groups, from = heads * part / s.parts, to = heads * (part + 1) / s.parts;
  const int64_t size = s.outer * s.batch * s.length * s.groups * s.states, most = heads_at_once(s);
  float* b_grad = part == 0 ? s.b_grad : s.partial + (part - 1) * 2 * size;
  float* c_grad = part == 0 ? s.c_grad : s.partial + (part - 1) * 2 * size + size;
  for (int64_t h = from; h < to; h += most)
    heads_gradient(s, element, group * heads + h, to - h < most ? to - h : most, h != from, b_grad, c_grad, scratch);
}

}  // namespace CAPIBARA_ISA

// Recurrences along a sequence, for one instruction set.
//
// The elementwise one is limited by memory; its state stays in the first-level cache. Each thread has columns of its own,
// so that after each row it goes on somewhere else in memory, where the processor's prefetcher begins anew: the first
// lines of the next row are asked for ahead. Results that the caches could not hold are written past them, which saves
// reading what is overwritten.
//
// The selective scan is computed as it is defined, one position after the other, with two positions on every pass over the
// state; what saves arithmetic is that the state is kept divided by the decay since the last rescaling, so that a
// position costs two multiply-adds for each number of the state instead of three operations.
#include "scan.h"
#include "scan_backward.h"
#include "stream.h"
#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Recurrence;
using capibara::SelectiveScan;

static inline float least(float a, float b) { return a < b ? a : b; }
static inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

constexpr int64_t kLine = 16;          // floats in a line of the cache
constexpr int64_t kPage = 1024;       // floats in a page of memory
constexpr int64_t kAhead = 4 * kLine;  // of a row, asked for while the one before it is worked on
constexpr int64_t kStreamed = 4 << 20;  // floats from which on results are written past the caches

static bool is_large(const Recurrence& r) { return r.steps * r.width >= kStreamed; }

// Columns of one item: whole lines of the cache, and not more items than threads unless rows are very long. Half a page
// of each row takes as long to come from memory as all of it (measured on Zen 4): there larger shares are whole pages.
static int64_t item_width(const Recurrence& r) {
  const int64_t most = 2 * kPage, share = up_to((r.width + r.threads - 1) / r.threads, kLine);
  const int64_t whole = is_large(r) && share > kPage / 4 ? up_to(share, kPage) : share;
  return whole > most ? most : whole;
}

static int64_t recurrence_items(const Recurrence& r) {
  return r.width == 0 ? 0 : (r.width + item_width(r) - 1) / item_width(r);
}
static int64_t recurrence_scratch(const Recurrence& r) { return item_width(r) + 16; }

static inline float take(const float* p, float) { return *p; }
static inline Vec take(const float* p, Vec) { return load(p); }
template <bool kStream>
static inline void give(float* p, float x) { *p = x; }
template <bool kStream>
static inline void give(float* p, Vec x) {
  if (kStream)
    stream(p, x);
  else
    store(p, x);
}

template <bool kLate, bool kStream, class T>
static inline void advance(const float* a, const float* x, float* state, float* out) {
  const T u = take(state, T{}), coefficient = take(a, T{}), added = take(x, T{});
  const T y = kLate ? added + u : coefficient * u + added;
  give<kStream>(out, y);
  give<false>(state, kLate ? coefficient * y : y);
}

template <bool kLate, bool kStream>
static void run_recurrence(const Recurrence& r, int64_t begin, int64_t count, float* state) {
  for (int64_t c = 0; c < count; ++c) state[c] = r.first[begin + c];
  const int64_t step = r.reverse ? -r.width : r.width, a_step = r.reverse ? -r.a_step : r.a_step;
  const int64_t start = r.reverse ? r.steps - 1 : 0;
  const float* x = r.x + start * r.width + begin;
  const float* a = r.a + start * r.a_step + begin;
  float* out = r.out + start * r.width + begin;
  for (int64_t t = 0; t < r.steps; ++t, x += step, a += a_step, out += step) {
    if (t + 1 < r.steps)
      for (int64_t c = 0; c < count && c < kAhead; c += kLine) {
        __builtin_prefetch(a + a_step + c);
        __builtin_prefetch(x + step + c);
      }
    int64_t c = 0;
    for (; c + kWidth <= count; c += kWidth) advance<kLate, kStream, Vec>(a + c, x + c, state + c, out + c);
    for (; c < count; ++c) advance<kLate, kStream, float>(a + c, x + c, state + c, out + c);
  }
  if (kStream) end_streams();
  for (int64_t c = 0; c < count; ++c) r.last[begin + c] = state[c];
}

static void recurrence(const Recurrence& r, int64_t item, float* scratch) {
  const int64_t size = item_width(r), begin = item * size;
  const int64_t count = r.width - begin < size ? r.width - begin : size;
  const bool large = is_large(r) && streams(r.out) && r.width % kLine == 0;
  if (large)
    (r.late ? run_recurrence<true, true> : run_recurrence<false, true>)(r, begin, count, scratch);
  else
    (r.late ? run_recurrence<true, false> : run_recurrence<false, false>)(r, begin, count, scratch);
}

constexpr int64_t kBlock = 64;      // positions whose decays are taken at once
constexpr int64_t kSoon = 16;       // positions after which a row is read that is asked for now
constexpr float kFar = 20.0f;       // bits of decay after which the state is rescaled
constexpr int64_t kLanes = 2 * kWidth;

static int64_t selective_items(const SelectiveScan& s) { return s.outer * s.batch * s.heads; }
static int64_t selective_scratch(const SelectiveScan& s) {
  return (s.states + 4) * up_to(s.width, kLanes) + 3 * kBlock + 64;
}

// One or two positions, of which the state is handed through registers. push: [kSteps, wide].
template <int kSteps>
static inline void positions(int64_t states, int64_t wide, int64_t step, const float* b, const float* c,
                             const float* push, float* state, float* sums) {
  for (int64_t p = 0; p < wide; p += kLanes) {
    Vec total[kSteps][2] = {}, added[kSteps][2];
    for (int i = 0; i < kSteps; ++i)
      for (int v = 0; v < 2; ++v) added[i][v] = load(push + i * wide + p + v * kWidth);
    for (int64_t n = 0; n < states; ++n) {
      float* at = state + n * wide + p;
      Vec h[2] = {load(at), load(at + kWidth)};
      for (int i = 0; i < kSteps; ++i) {
        const Vec write = splat(b[i * step + n]), read = splat(c[i * step + n]);
        for (int v = 0; v < 2; ++v) {
          h[v] += added[i][v] * write;
          total[i][v] += h[v] * read;
        }
      }
      store(at, h[0]);
      store(at + kWidth, h[1]);
    }
    for (int i = 0; i < kSteps; ++i)
      for (int v = 0; v < 2; ++v) store(sums + i * wide + p + v * kWidth, total[i][v]);
  }
}

static void selective(const SelectiveScan& s, int64_t item, float* scratch) {
  const int64_t head = item % s.heads, element = item / s.heads, group = head / (s.heads / s.groups);
  const int64_t wide = up_to(s.width, kLanes), step = s.groups * s.states;
  float* state = scratch;                    // [states, wide], divided by the decay since it was rescaled
  float* push = state + s.states * wide;     // [2, wide]
  float* sums = push + 2 * wide;             // [2, wide]
  float* power = sums + 2 * wide;            // that decay, its logarithm to base 2, and its inverse
  float *decay = power + kBlock, *inverse = decay + kBlock;
  const float rate = s.a[element / s.batch * s.heads + head] * 1.44269504f;
  const float* first = s.first + (element * s.heads + head) * s.width * s.states;
  for (int64_t n = 0; n < s.states; ++n)
    for (int64_t p = 0; p < wide; ++p) state[n * wide + p] = p < s.width ? first[p * s.states + n] : 0;
  for (int64_t p = 0; p < 2 * wide; ++p) push[p] = 0;

  const float* dt = s.dt + element * s.length * s.heads + head;
  const int64_t x_step = s.heads * s.width;
  const float* x = s.x + element * s.length * x_step + head * s.width;
  float* y = s.y + element * s.length * x_step + head * s.width;
  const float* b = s.b + element * s.length * step + group * s.states;
  const float* c = s.c + element * s.length * step + group * s.states;
  float since = 0;  // log2 of the decay since the state was rescaled
  const auto rescale = [&](float bits) {
    // Growth in two halves, for what a float cannot hold in one; what is left out overflows in any case.
    const Vec factor = exp2(splat(bits > 126 ? 126 : bits)), rest = exp2(splat(bits > 126 ? least(bits - 126, 126) : 0));
    for (int64_t i = 0; i < s.states * wide; i += kWidth) store(state + i, load(state + i) * factor * rest);
  };
  for (int64_t t = 0; t < s.length;) {
    // As many positions as there are until the state has to be rescaled.
    const int64_t most = s.length - t < kBlock ? s.length - t : kBlock;
    int64_t count = 0;
    for (; count < most; ++count) {
      const float now = since + dt[(t + count) * s.heads] * rate;
      if (!(now >= -kFar && now <= kFar)) break;
      power[count] = since = now;
    }
    if (count == 0) {
      rescale(since + dt[t * s.heads] * rate);
      power[0] = since = 0;
      count = 1;
    }
    for (int64_t i = count; i < kBlock && i % kWidth != 0; ++i) power[i] = 0;
    for (int64_t i = 0; i < count; i += kWidth) {
      store(decay + i, exp2(load(power + i)));
      store(inverse + i, exp2(-load(power + i)));
    }
    for (int64_t i = 0; i < count;) {
      const int64_t pair = count - i > 1 ? 2 : 1;
      if (t + i + kSoon + 1 < s.length)
        for (int64_t p = 0; p < s.width; p += kLine) {
          // A row is short and far from the next one, which the prefetcher does not follow.
          const int64_t at = (t + i + kSoon) * x_step + p;
          __builtin_prefetch(x + at);
          __builtin_prefetch(x + at + x_step);
          __builtin_prefetch(y + at, 1);
          __builtin_prefetch(y + at + x_step, 1);
        }
      for (int64_t k = 0; k < pair; ++k) {
        const float factor = dt[(t + i + k) * s.heads] * inverse[i + k];
        const float* from = x + (t + i + k) * x_step;
        for (int64_t p = 0; p < s.width; ++p) push[k * wide + p] = from[p] * factor;
      }
      if (pair == 2)
        positions<2>(s.states, wide, step, b + (t + i) * step, c + (t + i) * step, push, state, sums);
      else
        positions<1>(s.states, wide, step, b + (t + i) * step, c + (t + i) * step, push, state, sums);
      for (int64_t k = 0; k < pair; ++k) {
        float* to = y + (t + i + k) * x_step;
        for (int64_t p = 0; p < s.width; ++p) to[p] = sums[k * wide + p] * decay[i + k];
      }
      i += pair;
    }
    t += count;
  }
  rescale(since);
  float* last = s.last + (element * s.heads + head) * s.width * s.states;
  for (int64_t n = 0; n < s.states; ++n)
    for (int64_t p = 0; p < s.width; ++p) last[p * s.states + n] = state[n * wide + p];
}

extern const capibara::ScanKernels kScan;
const capibara::ScanKernels kScan = {recurrence_items, recurrence_scratch, recurrence,
                                     selective_items,  selective_scratch,  selective,
                                     gradient_items,   gradient_scratch,   gradient};

}  // namespace CAPIBARA_ISA

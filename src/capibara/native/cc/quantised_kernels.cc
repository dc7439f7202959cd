// Products with a matrix in codes, compiled once per instruction set.
#include "quantised.h"

#include "quantised_wide.h"

namespace CAPIBARA_ISA {

static bool is_thin(const CodesProduct& p) { return p.count <= capibara::kFewVectors; }
static bool is_empty(const CodesProduct& p) { return p.count == 0 || p.w.rows == 0 || p.w.inner == 0; }

static int64_t codes_room(const CodesProduct& p) {
  if (is_empty(p)) return 0;
  if (p.across)
    return is_thin(p) ? parts(p.w.rows, thin_share(p)) * p.count * p.w.inner
                      : parts(p.w.rows, kDeep) * p.count * kDeepStep;
  return is_thin(p) ? 0 : up(p.count, kPanel) * p.w.inner;
}

static int64_t codes_pack_items(const CodesProduct& p) {
  if (is_empty(p) || is_thin(p)) return 0;
  return p.across ? parts(p.w.rows, kDeep) : parts(p.count, kPanel) * parts(p.w.inner, kDeep);
}

static void codes_pack(const CodesProduct& p, int64_t item) {
  if (p.across) return pack_blocks(p, item);
  p.w.four ? pack_panels<Four>(p, item) : pack_panels<Eight>(p, item);
}

static int64_t codes_items(const CodesProduct& p) {
  if (is_empty(p)) return 0;
  if (is_thin(p)) return parts(p.w.rows, thin_share(p));
  if (p.across) return parts(p.w.inner, wide_columns(p)) * parts(p.count, kMostAcross);
  return parts(p.w.rows, wide_rows(p)) * parts(p.count, kMostVectors);
}

static int64_t codes_scratch(const CodesProduct& p) {
  if (is_thin(p) && !p.across) return (1 + p.count) * p.w.inner;  // a row of the matrix, and arranged vectors
  if (is_thin(p))
    return most(kAbreastAcross * kTogetherAcross * p.w.groups, kBlockRows * (kBlockColumns + p.count));
  if (p.across)
    return kDeep * kMostColumns + least(p.count, kMostAcross) * (kMostColumns + 16);
  return kMostRows * (kDeepStep + up(least(p.count, kMostVectors), kPanel) + 16);
}

template <typename C>
static void multiply_thin(const CodesProduct& p, int64_t item, float* scratch) {
  p.across ? thin_across<C>(p, item, scratch) : thin<C>(p, item, scratch);
}
template <typename C>
static void multiply_wide(const CodesProduct& p, int64_t item, float* scratch) {
  p.across ? wide_across<C>(p, item, scratch) : wide<C>(p, item, scratch);
}
// Calls use(codes) with the type that reads these fastest.
template <class Use>
static void with_codes(const Codes& w, Use use) {
  if (!w.four) return use(Eight());
  switch (levels_of(w)) {
    case Levels::kAny: return use(Four());
    case Levels::kBfloat16: return use(Bfloat16Four());
    case Levels::kWhole: return use(WholeFour());
  }
}
static void codes_multiply(const CodesProduct& p, int64_t item, float* scratch) {
  if (is_thin(p))
    with_codes(p.w, [&](auto codes) { multiply_thin<decltype(codes)>(p, item, scratch); });
  else
    p.w.four ? multiply_wide<Four>(p, item, scratch) : multiply_wide<Eight>(p, item, scratch);
}

static int64_t codes_block(const CodesProduct& p) { return p.across && is_thin(p) ? codes_items(p) : 0; }
static void codes_finish_columns(const CodesProduct& p, int64_t row, int64_t first, int64_t count) {
  if (!p.across) return;
  with_codes(p.w, [&](auto codes) { finish_thin<decltype(codes)>(p, row, first, count); });
}
static void codes_finish(const CodesProduct& p, int64_t) {
  for (int64_t n = 0; n < p.count; ++n) codes_finish_columns(p, n, 0, p.w.inner);
}

template <typename C>
static void decode_as(const Codes& w, int64_t first, int64_t last, int64_t begin, int64_t end, float top, float* out) {
  const typename C::Table table(w);
  const IntVec order = lanes() / 2 + (lanes() & 1) * kWidth;
  const Vec high = splat(top), low = -high;
  const auto within = [&](Vec x) {
    const Vec y = x < low ? low : x;
    return y > high ? high : y;
  };
  for (int64_t row = first; row < last; ++row, out += end - begin) {
    float* const to = out - begin;
    numbers<C>(
        w, table, row, begin, end,
        [&](int64_t k, const Vec* values) {
          if (C::kVecs == 1) return store(to + k, within(values[0]));
          const Vec even = within(values[0]), odd = within(values[C::kVecs - 1]);
          store(to + k, pick(even, odd, order));
          store(to + k + kWidth, pick(even, odd, order + kWidth / 2));
        },
        [&](int64_t k, float value) { to[k] = within(splat(value))[0]; });
  }
}
static void codes_decode(const Codes& w, int64_t first, int64_t last, int64_t begin, int64_t end, float top,
                         float* out) {
  w.four ? decode_as<Four>(w, first, last, begin, end, top, out)
         : decode_as<Eight>(w, first, last, begin, end, top, out);
}

extern const capibara::QuantisedKernels kQuantised;
const capibara::QuantisedKernels kQuantised = {
    codes_room,  codes_pack_items, codes_pack,           codes_items, codes_scratch, codes_multiply,
    codes_block, codes_finish,     codes_finish_columns, fetch_thin,  codes_decode};

}  // namespace CAPIBARA_ISA

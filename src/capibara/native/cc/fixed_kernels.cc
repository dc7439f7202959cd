// The search for each group's scale, compiled once per instruction set.
//
// A vector's lanes are groups: their numbers are transposed first, and then nothing has to be added across lanes, and
// groups may be of any size. Arithmetic with codes is that of integers of 32 bits, as in Python; what leads to them is
// float64 there and here, each operation rounded once.
#include "fixed.h"

#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::FixedSearch;
using capibara::kFixedRatio;
using capibara::kFixedScales;
using capibara::kFixedUnit;

constexpr int kMostCandidates = 256;

// To the nearest integer, ties to even, for |x| < 2^51.
static inline double nearest(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  return (x + magic) - magic;
}

static inline double power_of_two(int64_t n) {
  const union {
    int64_t bits;
    double value;
  } x = {(n + 1023) << 52};
  return x.value;
}

// e with 2^(e - 1) <= x < 2^e, of a positive normal number.
static inline int64_t exponent(double x) {
  const union {
    double value;
    int64_t bits;
  } y = {x};
  return ((y.bits >> 52) & 2047) - 1022;
}

static inline IntVec load_int(const int32_t* p) { return (IntVec)load(reinterpret_cast<const float*>(p)); }
static inline IntVec splat_int(int32_t x) { return x - (IntVec){}; }

// A table of up to 16 integers, looked up by each lane.
struct Table16 {
#if defined(__AVX512F__)
  IntVec all;
  explicit Table16(const int32_t* p) : all(load_int(p)) {}
  inline __attribute__((always_inline)) IntVec small(IntVec at) const { return look(at); }
  inline __attribute__((always_inline)) IntVec look(IntVec at) const {
    IntVec y;
    asm("vpermd %2, %1, %0" : "=v"(y) : "v"(at), "v"(all));
    return y;
  }
#elif defined(__AVX2__)
  IntVec low, high;
  explicit Table16(const int32_t* p) : low(load_int(p)), high(load_int(p + 8)) {}
  // Of the first eight.
  inline __attribute__((always_inline)) IntVec small(IntVec at) const {
    IntVec y;
    asm("vpermd %2, %1, %0" : "=x"(y) : "x"(at), "x"(low));
    return y;
  }
  inline __attribute__((always_inline)) IntVec look(IntVec at) const {
    IntVec a, b;
    asm("vpermd %2, %1, %0" : "=x"(a) : "x"(at), "x"(low));
    asm("vpermd %2, %1, %0" : "=x"(b) : "x"(at), "x"(high));
    return at > 7 ? b : a;
  }
#else
  const int32_t* all;
  explicit Table16(const int32_t* p) : all(p) {}
  inline IntVec look(IntVec at) const { return (IntVec){all[at[0]], all[at[1]], all[at[2]], all[at[3]]}; }
#endif
};

// Which of sixteen levels is nearest: how many of the middles between neighbours are not above q.
struct Book {
#if defined(__AVX2__)
  // The middles as a tree, one table for each of its floors.
  alignas(64) int32_t floors[4][16] = {};
  explicit Book(const int32_t* book) {
    for (int floor = 0; floor < 4; ++floor)
      for (int i = 0; i < 1 << floor; ++i) {
        const int at = (2 * i + 1) * (8 >> floor) - 1;
        floors[floor][i] = book[at] + book[at + 1];
      }
  }
  inline __attribute__((always_inline)) IntVec code(IntVec q) const {
    IntVec at = splat_int(0) - (q >= splat_int(floors[0][0]));
#pragma GCC unroll 3
    for (int floor = 1; floor < 4; ++floor) at = at + at - (q >= Table16(floors[floor]).small(at));
    return at;
  }
#else
  uint8_t near[4096];
  explicit Book(const int32_t* book) {
    int code = 0;
    for (int q = -2048; q < 2048; ++q) {
      while (code < 15 && book[code] + book[code + 1] <= q) ++code;
      near[q + 2048] = uint8_t(code);
    }
  }
  inline IntVec code(IntVec q) const {
    const IntVec low = splat_int(-2048), high = splat_int(2047);
    q = q < low ? low : q;
    q = (q > high ? high : q) + 2048;
    return (IntVec){near[q[0]], near[q[1]], near[q[2]], near[q[3]]};
  }
#endif
};

struct WithBook {
  Book book;
  Table16 levels;
  explicit WithBook(const FixedSearch& s) : book(s.book), levels(s.book) {}
  inline __attribute__((always_inline)) IntVec code(WordVec product) const {
    return book.code((IntVec)product >> kFixedRatio);
  }
  inline __attribute__((always_inline)) IntVec level(WordVec product) const { return levels.look(code(product)); }
};

template <int kBits>
struct Whole {
  static constexpr int kShift = kBits == 8 ? 22 : 26;
  static constexpr int kLow = -(1 << (kBits - 1)), kHigh = (1 << (kBits - 1)) - 1;
  explicit Whole(const FixedSearch&) {}
  inline __attribute__((always_inline)) IntVec code(WordVec product) const {
    const IntVec x = (IntVec)(product + (1u << (kShift - 1))) >> kShift, low = splat_int(kLow), high = splat_int(kHigh);
    const IntVec y = x < low ? low : x;
    return y > high ? high : y;
  }
  inline __attribute__((always_inline)) IntVec level(WordVec product) const { return code(product); }
};

template <typename T, typename Bits>
static double largest_of(const void* values, int64_t size) {
  // As integers, without the sign: their order is that of the numbers.
  typedef Bits __attribute__((may_alias)) Any;
  const Any* p = static_cast<const Any*>(values);
  Bits most = 0;
  constexpr Bits kSize = ~Bits(0) >> 1;
  for (int64_t i = 0; i < size; ++i) most = (p[i] & kSize) > most ? (p[i] & kSize) : most;
  const union {
    Bits bits;
    T value;
  } x = {most};
  return double(x.value);
}

static double largest_number(const void* values, int64_t group, int64_t size, bool wide) {
  if (wide) return largest_of<double, uint64_t>(static_cast<const double*>(values) + group * size, size);
  return largest_of<float, uint32_t>(static_cast<const float*>(values) + group * size, size);
}

static void fixed_largest(const void* values, int64_t groups, int64_t size, int32_t wide, double* out) {
  for (int64_t g = 0; g < groups; ++g) out[g] = largest_number(values, g, size, wide);
}

template <typename T>
static inline void units_of(const T* from, int64_t size, double factor, int32_t* to) {
  for (int64_t n = 0; n < size; ++n) to[n * kWidth] = int32_t(nearest(double(from[n]) * factor));
}

static int64_t fixed_scratch(const FixedSearch& s) { return (s.size + 2 * kMostCandidates) * int64_t(sizeof(IntVec)); }

template <class Levels>
static void fixed_search_by(const FixedSearch& s, void* scratch) {
  const Levels levels(s);
  int32_t* const units = static_cast<int32_t*>(scratch);
  int32_t* const scales = units + s.size * kWidth;           // [candidates][lane]
  int32_t* const ratios = scales + kMostCandidates * kWidth;
  const int count = s.high - s.low + 1, candidates = s.both_signs ? 2 * count : count;
  const double shift = s.book != nullptr ? double(1 << (kFixedRatio + 1)) : s.bits == 8 ? double(1 << 22) : double(1 << 26);
  double fits[kFixedScales];  // what the scales hold without cutting off
  for (int i = 0; i < kFixedScales; ++i) fits[i] = s.scales[i] * s.largest;
  const IntVec cap = splat_int(s.cap);
  for (int64_t first = 0; first < s.groups; first += kWidth) {
    const int there = s.groups - first < kWidth ? int(s.groups - first) : kWidth;
    int32_t places[kWidth];  // of the scale that just cuts nothing off
    for (int l = 0; l < kWidth; ++l) {
      const int64_t group = first + (l < there ? l : 0);
      const double most = largest_number(s.values, group, s.size, s.wide);
      int above = 0;  // scales that are enough, which are the first
      for (int step = kFixedScales / 2; step > 0; step /= 2)
        if (fits[above + step - 1] >= most) above += step;
      if (above == kFixedScales - 1 && fits[kFixedScales - 1] >= most) ++above;
      places[l] = above - 1;
      const double floor = fits[s.last];
      const int64_t power = kFixedUnit - exponent(most > floor ? most : floor);
      const double factor = power_of_two(power);
      if (s.wide)
        units_of(static_cast<const double*>(s.values) + group * s.size, s.size, factor, units + l);
      else
        units_of(static_cast<const float*>(s.values) + group * s.size, s.size, factor, units + l);
      for (int c = 0; c < count; ++c) {
        const int place = places[l] + s.low + c, k = place < 0 ? 0 : place > s.last ? s.last : place;
        const double scaled = s.scales[k] * factor;
        const int32_t scale = int32_t(nearest(scaled * double(1 << s.fraction)));
        const int32_t ratio = int32_t(nearest(shift / scaled));
        scales[c * kWidth + l] = scale, ratios[c * kWidth + l] = ratio;
        scales[(count + c) * kWidth + l] = -scale, ratios[(count + c) * kWidth + l] = -ratio;
      }
    }
    IntVec best = splat_int(0), least = splat_int(0x7fffffff), ratio_of_best = load_int(ratios);
    for (int c = 0; c < candidates; ++c) {
      const WordVec scale = (WordVec)load_int(scales + c * kWidth), ratio = (WordVec)load_int(ratios + c * kWidth);
      WordVec total = {};
      for (int64_t n = 0; n < s.size; ++n) {
        const WordVec unit = (WordVec)load_int(units + n * kWidth);
        const IntVec off = (IntVec)((unit << s.fraction) - (WordVec)levels.level(unit * ratio) * scale);
        IntVec error = (off < 0 ? -off : off) >> s.shift;
        error = error > cap ? cap : error;
        total += (WordVec)error * (WordVec)error;
      }
      const IntVec better = (IntVec)total < least;
      least = better ? (IntVec)total : least;
      best = better ? splat_int(c) : best;
      ratio_of_best = better ? (IntVec)ratio : ratio_of_best;
    }
    for (int l = 0; l < there; ++l) {
      const int sign = best[l] >= count, place = places[l] + s.low + best[l] % count;
      const int k = place < 0 ? 0 : place > s.last ? s.last : place;
      s.chosen[first + l] = uint8_t(k | sign << 7);
    }
    for (int64_t n = 0; n < s.size; ++n) {
      const IntVec found = levels.code((WordVec)load_int(units + n * kWidth) * (WordVec)ratio_of_best);
      for (int l = 0; l < there; ++l) s.codes[(first + l) * s.size + n] = int8_t(found[l]);
    }
  }
}

static void fixed_search(const FixedSearch& s, void* scratch) {
  if (s.book != nullptr) return fixed_search_by<WithBook>(s, scratch);
  s.bits == 8 ? fixed_search_by<Whole<8>>(s, scratch) : fixed_search_by<Whole<4>>(s, scratch);
}

extern const capibara::FixedKernels kFixed;
const capibara::FixedKernels kFixed = {fixed_scratch, fixed_search, fixed_largest};

}  // namespace CAPIBARA_ISA

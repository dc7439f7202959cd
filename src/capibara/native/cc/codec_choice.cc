#include "codec_choice.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <type_traits>

namespace capibara {
namespace {

constexpr int kMostFraction = 3, kLogBits = 12;

// 4096 log2(1 + i / 4096), by squaring; as in codecs/choice.py.
struct Logs {
  int32_t of[kScale];
  Logs() {
    for (int64_t i = 0; i < kScale; ++i) {
      uint64_t x = (uint64_t(1) << 31) + (uint64_t(i) << 19);
      int32_t out = 0;
      for (int bit = 0; bit < kLogBits; ++bit) {
        x = x * x >> 31;
        const uint64_t over = x >> 32;
        out = out << 1 | int32_t(over);
        x >>= over;
      }
      of[i] = out;
    }
  }
};

int64_t fixed_log(int64_t n) {
  static const Logs logs;
  if (n < 2) return 0;
  const int e = bit_length(uint64_t(n)) - 1;
  const int64_t index = (e > 12 ? n >> (e - 12) : n << (12 - e)) - kScale;
  return (int64_t(e) << kLogBits) + logs.of[index];
}

// About how many bits, times 4096, tables and symbols take.
int64_t estimate(const std::vector<std::vector<int64_t>>& counts, int symbol_bits) {
  int64_t bits = 0;
  std::vector<int64_t> kept;
  for (const auto& row : counts) {
    const int64_t total = std::accumulate(row.begin(), row.end(), int64_t(0));
    kept.clear();
    for (int64_t c : row)
      if (c > 0 && c * 8192 >= total) kept.push_back(c);
    if (kept.size() > 255) {
      std::nth_element(kept.begin(), kept.begin() + 255, kept.end(), std::greater<int64_t>());
      kept.resize(255);
    }
    int64_t escapes = total;
    bits += total * fixed_log(total) + (int64_t(40) << kLogBits);
    for (int64_t c : kept) {
      escapes -= c;
      bits -= c * fixed_log(c);
      bits += 2 * fixed_log(1 + kScale * c / total) + (2 << kLogBits);
    }
    bits -= escapes * fixed_log(escapes);
    bits += escapes * symbol_bits << kLogBits;
  }
  return bits;
}

// Frequencies that add up to 4096; as entropy/frequencies.py.
std::vector<int64_t> normalise(const std::vector<int64_t>& counts) {
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t(0));
  std::vector<int64_t> shares(counts.size(), 0);
  if (total == 0) return shares;
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i]) shares[i] = std::max<int64_t>(counts[i] * kScale / total, 1);
  std::vector<size_t> order(counts.size());
  std::vector<double> key(counts.size());
  int64_t missing;
  while ((missing = kScale - std::accumulate(shares.begin(), shares.end(), int64_t(0))) != 0) {
    int64_t most = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      if (missing > 0) {
        key[i] = counts[i] ? -(double(counts[i]) / (double(shares[i]) + 0.5)) : 1.0;
        most += counts[i] > 0;
      } else {
        key[i] = shares[i] > 1 ? double(counts[i]) / (double(shares[i]) - 0.5) : HUGE_VAL;
        most += shares[i] > 1;
      }
    }
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key[a] < key[b]; });
    most = std::min(most, std::abs(missing));
    for (int64_t i = 0; i < most; ++i) shares[order[size_t(i)]] += missing > 0 ? 1 : -1;
  }
  return shares;
}

template <typename T>
std::vector<Cut> cut_integers(const Form& form, const void* bits, int64_t rows, int64_t length,
                              std::vector<uint8_t>& shifted) {
  using S = std::make_signed_t<T>;
  const T* x = static_cast<const T*>(bits);
  const int64_t count = rows * length;
  shifted.resize(size_t(count) * sizeof(T));
  T* out = reinterpret_cast<T*>(shifted.data());
  T least = x[0], most = x[0];
  if (form.is_signed) {
    S a = S(x[0]), b = a;
    for (int64_t i = 0; i < count; ++i) a = std::min(a, S(x[i])), b = std::max(b, S(x[i]));
    least = T(a), most = T(b);
  } else {
    for (int64_t i = 0; i < count; ++i) least = std::min(least, x[i]), most = std::max(most, x[i]);
  }
  const bool alternating = form.is_signed && S(least) < 0 && S(most) > 0;
  int width;
  if (alternating) {
    T all = 0;
    for (int64_t i = 0; i < count; ++i) all |= out[i] = T(T(x[i] << 1) ^ T(S(x[i]) >> (sizeof(T) * 8 - 1)));
    width = bit_length(all);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = T(x[i] - least);
    width = std::max(bit_length(T(most - least)), 1);
  }
  const uint64_t base = form.is_signed ? uint64_t(int64_t(S(least))) : uint64_t(least);
  std::vector<Cut> cuts;
  for (int n = std::min(width, 8); n <= std::min(width, 12); ++n)
    cuts.push_back({out, length, int32_t(sizeof(T)), width - n, n, 0, 0, alternating, alternating ? 0 : base});
  return cuts;
}

}  // namespace

Table make_table(const std::vector<int64_t>& counts) {
  Table out;
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t(0));
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i] > 0 && counts[i] * 8192 >= total) out.symbols.push_back(int64_t(i));
  if (out.symbols.size() > 255) {
    std::stable_sort(out.symbols.begin(), out.symbols.end(),
                     [&](int64_t a, int64_t b) { return counts[size_t(a)] > counts[size_t(b)]; });
    out.symbols.resize(255);
    std::sort(out.symbols.begin(), out.symbols.end());
  }
  std::vector<int64_t> kept;
  out.escapes = total;
  for (int64_t s : out.symbols) {
    kept.push_back(counts[size_t(s)]);
    out.escapes -= kept.back();
  }
  kept.push_back(out.escapes);
  out.frequencies = normalise(kept);
  return out;
}

std::vector<Cut> make_cuts(const Form& form, const void* bits, int64_t rows, int64_t length,
                           std::vector<uint8_t>& shifted) {
  if (form.exponent > 0) {
    std::vector<Cut> cuts;
    for (int m = 0; m <= std::min(kMostFraction, form.mantissa); ++m)
      cuts.push_back({bits, length, form.bits / 8, form.mantissa - m, form.exponent + m, 1, 0, 0, 0});
    return cuts;
  }
  switch (form.bits) {
    case 8: return cut_integers<uint8_t>(form, bits, rows, length, shifted);
    case 16: return cut_integers<uint16_t>(form, bits, rows, length, shifted);
    case 32: return cut_integers<uint32_t>(form, bits, rows, length, shifted);
    default: return cut_integers<uint64_t>(form, bits, rows, length, shifted);
  }
}

Counts gather(const std::vector<std::vector<int64_t>>& all) {
  Counts out;
  out.rows.resize(all.size());
  for (size_t i = 0; i < all[0].size(); ++i) {
    int64_t any = 0;
    for (const auto& row : all) any |= row[i];
    if (any == 0) continue;
    out.symbols.push_back(int64_t(i));
    for (size_t k = 0; k < all.size(); ++k) out.rows[k].push_back(all[k][i]);
  }
  return out;
}

Counts merge(const Counts& counts, size_t classes, int bits) {
  Counts out;
  out.rows.resize(classes);
  const size_t each = counts.rows.size() / classes;
  for (size_t i = 0; i < counts.symbols.size(); ++i) {
    const int64_t symbol = counts.symbols[i] >> bits;
    if (out.symbols.empty() || out.symbols.back() != symbol) {
      out.symbols.push_back(symbol);
      for (auto& row : out.rows) row.push_back(0);
    }
    for (size_t k = 0; k < counts.rows.size(); ++k) out.rows[k / each].back() += counts.rows[k][i];
  }
  return out;
}

int zero_bits(const std::vector<uint64_t>& ors, const Cut& cut, std::vector<uint8_t>& dropping) {
  std::vector<int64_t> with(size_t(cut.shift) + 1, 0);
  std::vector<int> zeros(ors.size());
  for (size_t r = 0; r < ors.size(); ++r) {
    const uint64_t low = ors[r] & ((uint64_t(1) << cut.shift) - 1);
    zeros[r] = low ? __builtin_ctzll(low) : cut.shift;
    ++with[size_t(zeros[r])];
  }
  int drop = 0;
  int64_t best = -1, least = 0;
  for (int z = 0; z <= cut.shift; ++z) {
    if (with[size_t(z)] == 0) continue;
    const int64_t saved = z * (int64_t(ors.size()) - least);
    if (saved > best) best = saved, drop = z;
    least += with[size_t(z)];
  }
  for (size_t r = 0; r < ors.size(); ++r) dropping[r] = drop > 0 && zeros[r] >= drop;
  return drop;
}

Cut choose(const std::vector<Cut>& cuts, const Counts& finest, int64_t rows, int64_t length, int64_t& classes) {
  const size_t most = finest.rows.size();
  int64_t best = INT64_MAX;
  Cut cut = cuts[0];
  for (const Cut& one : cuts) {
    Counts merged = merge(finest, most, cuts.back().symbol_bits - one.symbol_bits);
    for (size_t k = most; k; k /= 2) {
      if (k < most) merged = merge(merged, k, 0);
      const int64_t blocks = int64_t(k) * divide_up(rows * length, kBlock * int64_t(k));
      const int64_t other = rows * length * (one.shift + one.sign) + rows * bit_length(uint64_t(k - 1)) + blocks * 1044;
      const int64_t size = estimate(merged.rows, one.symbol_bits) + (other << kLogBits);
      if (size < best) best = size, cut = one, classes = int64_t(k);
    }
  }
  return cut;
}

}  // namespace capibara

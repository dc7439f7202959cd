// A whole tensor to a payload and back: what codecs/lossless.py does step by step, with the same bytes.
//
// Every choice is made with whole numbers, or with single divisions of float64, which are exact to the last bit
// everywhere; this file is compiled without anything that would change that.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

#include "codec.h"
#include "codec_bits.h"
#include "isa.h"

namespace capibara {
namespace {

constexpr int64_t kScale = 1 << kScaleBits;
constexpr int kClasses = 8, kMostFraction = 3, kLogBits = 12;
constexpr int64_t kMostHeader = 1 << 15;

const CodecKernels& kernels() { return *isa().codec; }

bool has_crc32() {
  if (kernels().crc32 == nullptr) return false;
#if defined(__x86_64__)
  static const bool here = (__builtin_cpu_init(), __builtin_cpu_supports("pclmul"));
  return here;
#else
  return true;
#endif
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int bit_length(uint64_t n) { return n ? 64 - __builtin_clzll(n) : 0; }

// Runs work(i) for every i, on up to `threads` threads; without threads to be had, on this one.
template <typename Work>
void each(int threads, int64_t items, Work work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto take = [&] {
    try {
      for (int64_t i; (i = next.fetch_add(1)) < items;) work(i);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  std::vector<std::thread> crew;
  crew.reserve(size_t(std::max(threads, 1)));
  for (int64_t t = 1; t < std::min<int64_t>(threads, items); ++t) try {
      crew.emplace_back(take);
    } catch (const std::system_error&) {
      break;
    }
  take();
  for (auto& one : crew) one.join();
  if (out_of_memory) throw std::bad_alloc();
}

int64_t packed_size(int64_t count, int width) {
  int64_t bytes = 0;
  for (int size = 32; size; size /= 2)
    for (; width >= size; width -= size) bytes += (count * size + 7) / 8;
  return bytes;
}

// Fields of at most 16 bits, plane by plane; for what there are few of.
template <typename T>
void pack_few(const T* values, int64_t count, int width, uint8_t* out) {
  if (count == 0) return;
  for (int size = 32; size; size /= 2)
    while (width >= size) {
      width -= size;
      std::memset(out, 0, size_t((count * size + 7) / 8));
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t field = uint32_t(values[i] >> width) & ((1u << size) - 1);
        if (size < 8)
          out[i * size / 8] = uint8_t(out[i * size / 8] | field << i * size % 8);
        else
          for (int b = 0; b < size / 8; ++b) out[i * (size / 8) + b] = uint8_t(field >> 8 * b);
      }
      out += (count * size + 7) / 8;
    }
}

template <typename T>
void unpack_few(const uint8_t* data, int64_t count, int width, T* out) {
  std::fill(out, out + count, T(0));
  for (int size = 32; size; size /= 2)
    while (width >= size) {
      width -= size;
      for (int64_t i = 0; i < count; ++i) {
        uint32_t field = 0;
        if (size < 8)
          field = data[i * size / 8] >> i * size % 8 & ((1u << size) - 1);
        else
          for (int b = 0; b < size / 8; ++b) field |= uint32_t(data[i * (size / 8) + b]) << 8 * b;
        out[i] = T(out[i] | field << width);
      }
      data += (count * size + 7) / 8;
    }
}

// ---- choices -----------------------------------------------------------------------------------------------------

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

struct Table {
  int drop = 0;
  std::vector<int64_t> symbols, frequencies;  // the last frequency is the escape's
  int64_t escapes = 0;
};

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

// How often symbols occur, for each class; only of those that do somewhere, which are few of all that there could be.
struct Counts {
  std::vector<int64_t> symbols;
  std::vector<std::vector<int64_t>> rows;
};

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

// Neighbouring classes taken together, and symbols that differ in their last `bits` only.
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

// How many low bits are worth leaving out, and the rows in which they are all zero.
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

// What coding a group needs beside its result. It stays with the thread: memory that is given back to the system is
// cleared anew, page by page, which takes longer than coding into it.
struct Scratch {
  std::unique_ptr<uint16_t[]> words;
  std::unique_ptr<uint8_t[]> symbols;
  int64_t room = 0;

  void fit(int64_t count) {
    if (count <= room) return;
    room = 0;
    // A word past the last one is written before it is known to be needed.
    words.reset(new uint16_t[size_t(count) + 2]);
    symbols.reset(new uint8_t[size_t(count)]);
    room = count;
  }
};

// Where the streams of a group go: to a place of their own, or right behind those of the group before.
struct Sink {
  uint8_t* at = nullptr;
  int64_t left = 0;
};

struct Coded {
  Table table;
  std::vector<int64_t> chosen;
  std::vector<uint8_t> escapes, streams;
  std::vector<int64_t> words;  // of each block
  int64_t rest = 0;            // bytes
};

void put(std::vector<uint8_t>& out, const void* data, size_t size) {
  const size_t at = out.size();
  out.resize(at + size);
  std::memcpy(out.data() + at, data, size);
}

bool put(Sink& sink, const void* data, int64_t size) {
  if (size >= sink.left) return false;
  std::memcpy(sink.at, data, size_t(size));
  sink.at += size;
  sink.left -= size;
  return true;
}

// Splits and codes the rows of a group; `planes` takes group.rest bytes. Streams go to the sink, if there is one. False
// if it has too little room.
bool code_group(Cut cut, Coded& group, uint8_t* planes, Sink* sink) {
  const Table& table = group.table;
  const int64_t total = int64_t(group.chosen.size()) * cut.length;
  cut.drop = table.drop;
  const int escape = int(table.symbols.size());
  std::vector<uint8_t> entry(size_t(1) << cut.symbol_bits, uint8_t(escape));
  Part parts[256] = {};
  uint32_t start = 0;
  for (size_t i = 0; i < table.frequencies.size(); ++i) {
    const uint64_t f = uint64_t(table.frequencies[i]);
    if (i < table.symbols.size()) entry[size_t(table.symbols[i])] = uint8_t(i);
    if (f == 0) continue;
    parts[i] = {((uint64_t(1) << 44) + f - 1) / f, uint32_t((f << 20) - 1), uint32_t(kScale - int64_t(f)), start};
    start += uint32_t(f);
  }
  std::vector<uint16_t> escaped(size_t(table.escapes));
  static thread_local Scratch scratch;
  scratch.fit(std::min(total, kBlock));
  uint16_t* const end = scratch.words.get() + std::min(total, kBlock) + 2;
  uint8_t* const symbols = scratch.symbols.get();
  int64_t found = 0;
  for (int64_t begin = 0; begin < total; begin += kBlock) {
    const int64_t size = std::min(kBlock, total - begin);
    found += kernels().split(cut, group.chosen.data(), begin, size, total, entry.data(), escape, symbols, planes,
                             table.escapes ? escaped.data() + found : nullptr);
    uint32_t states[kLanes];
    const int64_t count = kernels().encode(symbols, size, parts, states, end);
    group.words.push_back(count);
    if (sink != nullptr) {
      if (!put(*sink, states, sizeof states) || !put(*sink, end - count, count * 2)) return false;
      continue;
    }
    put(group.streams, states, sizeof states);
    put(group.streams, end - count, size_t(count) * 2);
  }
  group.escapes.resize(size_t(packed_size(table.escapes, cut.symbol_bits)));
  pack_few(escaped.data(), table.escapes, cut.symbol_bits, group.escapes.data());
  return true;
}

int64_t encode_all(const Form& form, const void* bits, int64_t rows, int64_t length, int threads, uint8_t* out,
                   int64_t capacity) {
  std::vector<uint8_t> shifted;
  const std::vector<Cut> cuts = make_cuts(form, bits, rows, length, shifted);
  const Cut& finest = cuts.back();
  std::vector<int64_t> sums(static_cast<size_t>(rows));
  std::vector<uint64_t> ors(static_cast<size_t>(rows));
  const int64_t share = divide_up(rows, std::max(threads, 1));
  const int coarse = finest.symbol_bits - cuts[0].symbol_bits;
  each(threads, divide_up(rows, share), [&](int64_t i) {
    Cut part = finest;
    part.rows = static_cast<const uint8_t*>(part.rows) + i * share * length * part.width;
    kernels().measure(part, std::min(share, rows - i * share), coarse, &sums[size_t(i * share)],
                      &ors[size_t(i * share)]);
  });
  std::vector<int64_t> order(static_cast<size_t>(rows)), rank(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sums[size_t(a)] < sums[size_t(b)]; });
  for (int64_t i = 0; i < rows; ++i) rank[size_t(order[size_t(i)])] = i;
  const int64_t most = rows >= kClasses ? kClasses : 1;
  std::vector<std::vector<int64_t>> counts(size_t(most), std::vector<int64_t>(size_t(1) << finest.symbol_bits, 0));
  each(threads, most, [&](int64_t k) {
    std::vector<uint32_t> scratch(size_t(4) << finest.symbol_bits, 0);
    const int64_t first = divide_up(k * rows, most), last = divide_up((k + 1) * rows, most);
    kernels().histogram(finest, &order[size_t(first)], last - first, scratch.data(), counts[size_t(k)].data());
  });

  const Counts finest_counts = gather(counts);
  int64_t best = INT64_MAX, classes = 1;
  Cut cut = cuts[0];
  for (const Cut& one : cuts) {
    Counts merged = merge(finest_counts, size_t(most), finest.symbol_bits - one.symbol_bits);
    for (int64_t k = most; k; k /= 2) {
      if (k < most) merged = merge(merged, size_t(k), 0);
      const int64_t blocks = k * divide_up(rows * length, kBlock * k);
      const int64_t other =
          rows * length * (one.shift + one.sign) + rows * bit_length(uint64_t(k - 1)) + blocks * 1044;
      const int64_t size = estimate(merged.rows, one.symbol_bits) + (other << kLogBits);
      if (size < best) best = size, cut = one, classes = k;
    }
  }
  std::vector<uint8_t> dropping(size_t(rows), 0);
  const int drop = form.exponent > 0 ? zero_bits(ors, cut, dropping) : 0;

  std::vector<Coded> groups;
  std::vector<uint8_t> which(static_cast<size_t>(rows));
  {
    int64_t index[2 * kClasses];
    bool used[2 * kClasses] = {};
    for (int64_t r = 0; r < rows; ++r) {
      which[size_t(r)] = uint8_t(rank[size_t(r)] * classes / rows * 2 + dropping[size_t(r)]);
      used[which[size_t(r)]] = true;
    }
    for (int name = 0; name < 2 * kClasses; ++name)
      if (used[name]) {
        index[name] = int64_t(groups.size());
        groups.emplace_back();
        groups.back().table.drop = name & 1 ? drop : 0;
      }
    for (int64_t r = 0; r < rows; ++r) {
      which[size_t(r)] = uint8_t(index[which[size_t(r)]]);
      groups[which[size_t(r)]].chosen.push_back(r);
    }
  }
  const bool whole = int64_t(groups.size()) == classes;  // then classes are groups, and are counted already
  const Counts by_class = merge(finest_counts, size_t(classes), finest.symbol_bits - cut.symbol_bits);
  each(threads, int64_t(groups.size()), [&](int64_t i) {
    Coded& group = groups[size_t(i)];
    std::vector<int64_t> counted(size_t(1) << cut.symbol_bits, 0);
    if (whole) {
      for (size_t s = 0; s < by_class.symbols.size(); ++s)
        counted[size_t(by_class.symbols[s])] = by_class.rows[size_t(i)][s];
    } else {
      std::vector<uint32_t> scratch(size_t(4) << cut.symbol_bits, 0);
      kernels().histogram(cut, group.chosen.data(), int64_t(group.chosen.size()), scratch.data(), counted.data());
    }
    const int drops = group.table.drop;
    group.table = make_table(counted);
    group.table.drop = drops;
    group.rest = packed_size(int64_t(group.chosen.size()) * length, cut.shift - drops + cut.sign);
  });

  // All but the words' counts and what depends on them; those have a fixed width, so every place is known.
  BitWriter header;
  header.write(uint64_t(cut.shift), 6);
  header.write(uint64_t(cut.symbol_bits), 5);
  header.write(uint64_t(cut.sign), 1);
  if (!cut.sign) {
    header.write(uint64_t(cut.alternating), 1);
    if (!cut.alternating) header.write(cut.base, 64);
  }
  header.write(groups.size() - 1, 4);
  for (const Coded& group : groups) {
    header.write(uint64_t(group.table.drop), 6);
    header.write(group.table.symbols.size(), 8);
    header.write_gamma(uint64_t(group.table.escapes));
    int64_t last = -1;
    for (size_t i = 0; i < group.table.symbols.size(); ++i) {
      header.write_gamma(uint64_t(group.table.symbols[i] - last - 1));
      header.write_gamma(uint64_t(group.table.frequencies[i] - 1));
      last = group.table.symbols[i];
    }
  }
  int64_t blocks = 0;
  for (const Coded& group : groups) blocks += divide_up(int64_t(group.chosen.size()) * length, kBlock);
  BitWriter sized = header;
  for (int64_t b = 0; b < blocks; ++b) sized.write(0, 19);
  const int class_bits = bit_length(groups.size() - 1);
  int64_t at = 4 + int64_t(sized.done().size());
  uint8_t* const which_at = out + at;
  at += packed_size(rows, class_bits);
  std::vector<int64_t> places;
  for (const Coded& group : groups) {
    places.push_back(at);
    at += packed_size(group.table.escapes, cut.symbol_bits) + group.rest;
  }
  if (at + blocks * 4 * kLanes >= capacity) return -1;
  pack_few(which.data(), rows, class_bits, which_at);
  // One thread does the groups in their order, so that each stream is written where it belongs.
  Sink sink{out + at, capacity - at};
  std::atomic<bool> too_long{false};
  each(threads, int64_t(groups.size()), [&](int64_t i) {
    Coded& group = groups[size_t(i)];
    const int64_t escapes = packed_size(group.table.escapes, cut.symbol_bits);
    uint8_t* planes = out + places[size_t(i)] + escapes;
    if (too_long || !code_group(cut, group, planes, threads > 1 ? nullptr : &sink)) {
      too_long = true;
      return;
    }
    if (escapes) std::memcpy(out + places[size_t(i)], group.escapes.data(), size_t(escapes));
  });
  if (too_long) return -1;
  if (threads <= 1) at = capacity - sink.left;
  for (const Coded& group : groups) {
    if (at + int64_t(group.streams.size()) >= capacity) return -1;
    std::memcpy(out + at, group.streams.data(), group.streams.size());
    at += int64_t(group.streams.size());
    for (int64_t count : group.words) header.write(uint64_t(count), 19);
  }
  const uint32_t size = uint32_t(header.done().size());
  for (int b = 0; b < 4; ++b) out[b] = uint8_t(size >> 8 * b);
  std::memcpy(out + 4, header.done().data(), size);
  return at;
}

// ---- decoding ----------------------------------------------------------------------------------------------------

enum Damage { kNone, kTooFew, kHeader, kCuts, kFrequencies, kRows, kTooManyEscapes, kShort, kLong, kBlocks, kCount };

struct Cursor {
  const uint8_t* at;
  int64_t left;
  // Null if there are fewer bytes.
  const uint8_t* take(int64_t size) {
    if (size > left) return nullptr;
    at += size;
    left -= size;
    return at - size;
  }
};

Damage read_tables(BitReader& reader, const Form& form, Cut& cut, std::vector<Table>& tables) {
  cut.shift = int32_t(reader.read(6));
  cut.symbol_bits = int32_t(reader.read(5));
  cut.sign = int32_t(reader.read(1));
  cut.alternating = !cut.sign && reader.read(1);
  cut.base = cut.sign || cut.alternating ? 0 : reader.read(64);
  if (!reader.good || cut.sign != (form.exponent > 0) || cut.symbol_bits < 1 || cut.symbol_bits > 14 ||
      cut.shift + cut.symbol_bits + cut.sign > form.bits)
    return kCuts;
  const int64_t groups = int64_t(reader.read(4)) + 1;
  for (int64_t i = 0; i < groups; ++i) {
    Table table;
    table.drop = int(reader.read(6));
    const uint64_t entries = reader.read(8);
    table.escapes = int64_t(reader.read_gamma());
    int64_t last = -1, left = kScale;
    for (uint64_t e = 0; e < entries; ++e) {
      last += int64_t(reader.read_gamma()) + 1;
      table.symbols.push_back(last);
      table.frequencies.push_back(int64_t(reader.read_gamma()) + 1);
      left -= table.frequencies.back();
    }
    if (!reader.good || table.drop > cut.shift || last >= int64_t(1) << cut.symbol_bits || left < 0 ||
        (left > 0) != (table.escapes > 0))
      return kFrequencies;
    table.frequencies.push_back(left);
    tables.push_back(std::move(table));
  }
  return kNone;
}

// What a group's tables become for decoding.
struct Prepared {
  uint64_t values[256] = {};
  uint32_t places[kScale];
  std::vector<uint16_t> escaped;

  void fill(const Table& one, const Cut& cut, const uint8_t* packed) {
    uint32_t place = 0;
    for (size_t e = 0; e < one.frequencies.size(); ++e) {
      if (e < one.symbols.size()) values[e] = uint64_t(one.symbols[e]);
      for (uint32_t w = 0; w < uint32_t(one.frequencies[e]); ++w)
        places[place++] = uint32_t(e) << 24 | (uint32_t(one.frequencies[e]) & (kScale - 1)) << kScaleBits | w;
    }
    escaped.resize(size_t(one.escapes));
    unpack_few(packed, one.escapes, cut.symbol_bits, escaped.data());
  }
};

int decode_all(const Form& form, const uint8_t* data, int64_t size, int64_t rows, int64_t length, int threads,
               void* out, bool past) {
  const int64_t count = rows * length, least = divide_up(count, kBlock);
  if (count == 0 || least * 4 * kLanes > size) return kTooFew;
  Cursor cursor{data, size};
  const uint8_t* head = cursor.take(4);
  const int64_t header = int64_t(head[0]) | int64_t(head[1]) << 8 | int64_t(head[2]) << 16 | int64_t(head[3]) << 24;
  if (header > kMostHeader + 3 * least) return kHeader;
  if ((head = cursor.take(header)) == nullptr) return kShort;
  BitReader reader(head, header);
  Cut cut{nullptr, length, form.bits / 8, 0, 0, 0, 0, 0, 0};
  std::vector<Table> tables;
  if (const Damage damage = read_tables(reader, form, cut, tables)) return damage;
  const int class_bits = bit_length(tables.size() - 1);
  const uint8_t* packed = cursor.take(packed_size(rows, class_bits));
  if (packed == nullptr) return kShort;
  std::vector<std::vector<int64_t>> chosen(tables.size());
  {
    std::vector<uint8_t> which(static_cast<size_t>(rows));
    unpack_few(packed, rows, class_bits, which.data());
    int64_t members[16] = {};
    for (uint8_t w : which) {
      if (w >= tables.size()) return kRows;
      ++members[w];
    }
    for (size_t i = 0; i < tables.size(); ++i) {
      if (members[i] == 0) return kRows;
      chosen[i].reserve(size_t(members[i]));
    }
    for (int64_t r = 0; r < rows; ++r) chosen[which[size_t(r)]].push_back(r);
  }
  struct Parts {
    const uint8_t *escaped, *planes;
    std::vector<Block> blocks;
  };
  std::vector<Parts> parts(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    const int64_t total = int64_t(chosen[i].size()) * length;
    if (tables[i].escapes > total) return kTooManyEscapes;
    parts[i].escaped = cursor.take(packed_size(tables[i].escapes, cut.symbol_bits));
    parts[i].planes = cursor.take(packed_size(total, cut.shift - tables[i].drop + cut.sign));
    if (parts[i].escaped == nullptr || parts[i].planes == nullptr) return kShort;
  }
  for (size_t i = 0; i < tables.size(); ++i)
    for (int64_t b = divide_up(int64_t(chosen[i].size()) * length, kBlock); b > 0; --b) {
      const int64_t words = int64_t(reader.read(19));
      const uint8_t* states = cursor.take(4 * kLanes);
      const uint8_t* first = states ? cursor.take(2 * words) : nullptr;
      if (!reader.good || first == nullptr) return kShort;
      parts[i].blocks.push_back({states, first, words});
    }
  if (!reader.finished() || cursor.left) return kLong;
  // Groups go two by two: the kernel does two at a time.
  std::atomic<int> worst{kNone};
  const int64_t together = threads > 1 ? 2 : int64_t(tables.size());
  each(threads, divide_up(int64_t(tables.size()), together), [&](int64_t n) {
    const size_t begin = size_t(n * together), end = std::min(begin + size_t(together), tables.size());
    std::vector<Prepared> prepared(end - begin);
    std::vector<Group> groups;
    for (size_t i = begin; i < end; ++i) {
      prepared[i - begin].fill(tables[i], cut, parts[i].escaped);
      const Prepared& with = prepared[i - begin];
      groups.push_back({chosen[i].data(), int64_t(chosen[i].size()), with.values, int(tables[i].symbols.size()),
                        with.places, parts[i].planes, parts[i].blocks.data(), with.escaped.data(), tables[i].escapes,
                        tables[i].drop});
    }
    const Outcome outcome = kernels().restore(cut, out, groups.data(), int(groups.size()), past);
    if (outcome != kFine) worst = outcome == kUneven ? kBlocks : kCount;
  });
  return worst;
}

}  // namespace

int64_t encode_tensor(const Form& form, const void* bits, int64_t rows, int64_t length, int threads, uint8_t* out,
                      int64_t capacity) {
  try {
    return encode_all(form, bits, rows, length, threads, out, capacity);
  } catch (const std::bad_alloc&) {
    return -2;
  }
}

int decode_tensor(const Form& form, const uint8_t* data, int64_t size, int64_t rows, int64_t length, int threads,
                  void* out, bool past) {
  try {
    return decode_all(form, data, size, rows, length, threads, out, past);
  } catch (const std::bad_alloc&) {
    return -2;
  }
}

namespace {

// Of zlib's polynomial, for the few bytes that the kernel leaves.
uint32_t crc32_of_few(uint32_t crc, const uint8_t* data, int64_t size) {
  for (; size > 0; --size) {
    crc ^= *data++;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
  }
  return crc;
}

void decode_one(Payload& one, bool past) {
  constexpr int64_t kLeast = 64, kStep = 16;
  const int64_t most = one.size < kLeast ? 0 : one.size - one.size % kStep;
  uint32_t crc = ~0u;
  if (most) crc = kernels().crc32(crc, one.data, most);
  crc = ~crc32_of_few(crc, one.data + most, one.size - most);
  if (crc != one.crc32)
    one.outcome = kOtherChecksum;
  else if (one.size < 1 || one.data[0] != 1)
    one.outcome = kOtherKind;
  else
    one.outcome = decode_tensor(one.form, one.data + 1, one.size - 1, one.rows, one.length, 1, one.out, past);
}

}  // namespace

bool decode_many(Payload* payloads, int64_t count, int threads) {
  if (!has_crc32()) return false;
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += payloads[i].rows * payloads[i].length * (payloads[i].form.bits / 8);
  each(threads, count, [&](int64_t i) { decode_one(payloads[i], bytes >= kPastCaches); });
  return true;
}

}  // namespace capibara

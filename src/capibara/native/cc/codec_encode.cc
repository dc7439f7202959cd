// A whole tensor to a payload: what codecs/steps.py does step by step, with the same bytes.
#include <memory>
#include <numeric>

#include "codec_bits.h"
#include "codec_choice.h"

namespace capibara {
namespace {

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
  int64_t classes = 1;
  const Cut cut = choose(cuts, finest_counts, rows, length, classes);
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
    std::copy(group.streams.begin(), group.streams.end(), out + at);
    at += int64_t(group.streams.size());
    for (int64_t count : group.words) header.write(uint64_t(count), 19);
  }
  const uint32_t size = uint32_t(header.done().size());
  for (int b = 0; b < 4; ++b) out[b] = uint8_t(size >> 8 * b);
  std::memcpy(out + 4, header.done().data(), size);
  return at;
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

}  // namespace capibara

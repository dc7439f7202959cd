// A payload to the tensor that it was, and many of them: see codec_encode.cc.
#include "codec_bits.h"
#include "codec_parts.h"

namespace capibara {
namespace {

constexpr int64_t kMostHeader = 1 << 15;

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

bool has_crc32() {
  if (kernels().crc32 == nullptr) return false;
#if defined(__x86_64__)
  static const bool here = (__builtin_cpu_init(), __builtin_cpu_supports("pclmul"));
  return here;
#else
  return true;
#endif
}

bool decode_many(Payload* payloads, int64_t count, int threads) {
  if (!has_crc32()) return false;
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += payloads[i].rows * payloads[i].length * (payloads[i].form.bits / 8);
  each(threads, count, [&](int64_t i) { decode_one(payloads[i], bytes >= kPastCaches); });
  return true;
}

}  // namespace capibara

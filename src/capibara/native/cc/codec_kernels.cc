// The codec's loops, compiled once per instruction set.
#include "codec.h"

#include "codec_crc.h"
#include "codec_join.h"
#include "codec_lanes.h"
#include "codec_split.h"

namespace CAPIBARA_ISA {

#define CAPIBARA_BY_WIDTH(kind, call)            \
  switch (cut.width) {                           \
    case 1: return kind<uint8_t>::call;       \
    case 2: return kind<uint16_t>::call;      \
    case 4: return kind<uint32_t>::call;      \
    default: return kind<uint64_t>::call;     \
  }

static void measure(const Cut& cut, int64_t count, int coarse, int64_t* sums, uint64_t* ors) {
  CAPIBARA_BY_WIDTH(Numbers, measure(cut, count, coarse, sums, ors))
}
static void histogram(const Cut& cut, const int64_t* chosen, int64_t count, uint32_t* scratch, int64_t* counts) {
  CAPIBARA_BY_WIDTH(Numbers, histogram(cut, chosen, count, scratch, counts))
}
static int64_t split(const Cut& cut, const int64_t* chosen, int64_t begin, int64_t size, int64_t total,
                     const uint8_t* entry, int escape, uint8_t* symbols, uint8_t* planes, uint16_t* escaped) {
  CAPIBARA_BY_WIDTH(Numbers, split(cut, chosen, begin, size, total, entry, escape, symbols, planes, escaped))
}
static capibara::Outcome restore(const Cut& cut, void* out, const capibara::Group* groups, int count, bool past) {
  CAPIBARA_BY_WIDTH(Joiner, restore(cut, out, groups, count, past))
}

extern const capibara::CodecKernels kCodec;
const capibara::CodecKernels kCodec = {measure, histogram, split, encode, restore, crc32};

}  // namespace CAPIBARA_ISA

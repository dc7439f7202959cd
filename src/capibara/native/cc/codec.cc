// The codec's functions by a plain C interface: Python calls them through ctypes, with or without JAX.
#include "codec.h"

#include "isa.h"

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

using capibara::Cut;

static const capibara::CodecKernels& kernels() { return *capibara::isa().codec; }

CAPIBARA_EXPORT void capibara_codec_measure(const Cut* cut, int64_t count, int32_t coarse, int64_t* sums,
                                            uint64_t* ors) {
  kernels().measure(*cut, count, coarse, sums, ors);
}
CAPIBARA_EXPORT void capibara_codec_histogram(const Cut* cut, int64_t count, const uint8_t* kind,
                                              int64_t* histogram) {
  kernels().histogram(*cut, count, kind, histogram);
}
CAPIBARA_EXPORT int64_t capibara_codec_split(const Cut* cut, const int64_t* chosen, int64_t count,
                                             const uint8_t* entry, int32_t escape, uint8_t* symbols, uint8_t* planes,
                                             uint16_t* escaped) {
  return kernels().split(*cut, chosen, count, entry, escape, symbols, planes, escaped);
}
CAPIBARA_EXPORT int64_t capibara_codec_join(const Cut* cut, void* rows, const int64_t* chosen, int64_t count,
                                            const uint64_t* values, int32_t escape, const uint8_t* symbols,
                                            const uint8_t* planes, const uint16_t* escaped, int64_t escapes,
                                            uint64_t base) {
  return kernels().join(*cut, rows, chosen, count, values, escape, symbols, planes, escaped, escapes, base);
}
CAPIBARA_EXPORT int64_t capibara_codec_encode(const uint8_t* symbols, int64_t count, const uint16_t* frequency,
                                              const uint16_t* start, uint32_t* states, uint16_t* words_end) {
  return kernels().encode(symbols, count, frequency, start, states, words_end);
}
CAPIBARA_EXPORT int32_t capibara_codec_decode(const uint32_t* states, const uint16_t* words, int64_t count_words,
                                              const uint32_t* table, uint8_t* symbols, int64_t count) {
  return kernels().decode(states, words, count_words, table, symbols, count);
}

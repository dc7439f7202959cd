// The codec's functions by a plain C interface: Python calls them through ctypes, with or without JAX.
#include "codec.h"

#include "isa.h"

#define CAPIBARA_EXPORT extern "C" __attribute__((visibility("default")))

CAPIBARA_EXPORT int64_t capibara_codec_encode_tensor(const capibara::Form* form, const void* bits, int64_t rows,
                                                     int64_t length, int32_t threads, uint8_t* out,
                                                     int64_t capacity) {
  return capibara::encode_tensor(*form, bits, rows, length, threads, out, capacity);
}
CAPIBARA_EXPORT int32_t capibara_codec_decode_tensor(const capibara::Form* form, const uint8_t* data, int64_t size,
                                                     int64_t rows, int64_t length, int32_t threads, void* out) {
  return capibara::decode_tensor(*form, data, size, rows, length, threads, out);
}

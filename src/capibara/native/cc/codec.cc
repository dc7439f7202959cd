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
  const bool past = rows * length * (form->bits / 8) >= capibara::kPastCaches;
  return capibara::decode_tensor(*form, data, size, rows, length, threads, out, past);
}
CAPIBARA_EXPORT int32_t capibara_codec_decode_many(capibara::Payload* payloads, int64_t count, int32_t threads) {
  return capibara::decode_many(payloads, count, threads);
}
// A CRC-32 as zlib's, of a size that is a multiple of 16 and at least 64. False where there is nothing quicker than zlib.
CAPIBARA_EXPORT int32_t capibara_crc32(uint32_t crc, const uint8_t* data, int64_t size, uint32_t* out) {
  if (!capibara::has_crc32()) return 0;
  *out = ~capibara::isa().codec->crc32(~crc, data, size);
  return 1;
}

// Arrays of zeros that take memory where they are written, as XLA sees them.
#include <cstdint>
#include <cstring>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

// Below that the call of the system takes as long as writing.
constexpr size_t kLeastBytes = 1 << 18;

// XLA's memory on a CPU is the process's own, from malloc: for whole pages that the system is given back it has zeros
// again, each when it is touched. Memory that is locked it keeps, and says so. Without a word it keeps memory that an
// allocator shares between processes, and the end of what does not fill its pages, where they are huge ones.
bool give_back(char* pages, size_t bytes) {
  volatile char* const first = pages;
  volatile char* const last = pages + bytes - 1;
  *first = *last = 1;
  return madvise(pages, bytes, MADV_DONTNEED) == 0 && *first == 0 && *last == 0;
}

void clear(char* data, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t before = (page - reinterpret_cast<uintptr_t>(data) % page) % page;
  if (bytes >= kLeastBytes) {
    const size_t whole = (bytes - before) / page * page;
    if (give_back(data + before, whole)) {
      std::memset(data, 0, before);
      std::memset(data + before + whole, 0, bytes - before - whole);
      return;
    }
  }
  std::memset(data, 0, bytes);
}

ffi::Error zeros(ffi::RemainingRets out) {
  for (size_t i = 0; i < out.size(); ++i) {
    auto one = out.get<ffi::AnyBuffer>(i);
    if (!one.has_value()) return one.error();
    clear(static_cast<char*>((*one)->untyped_data()), (*one)->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* capibara_zeros(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(capibara_zeros, zeros, ffi::Ffi::Bind().RemainingRets());

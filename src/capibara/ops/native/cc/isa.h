// The kernels for the processor that this runs on.
#pragma once

#include "attention.h"

namespace capibara {

struct Isa {
  const AttentionKernels* attention;
};

const Isa& isa();

}  // namespace capibara

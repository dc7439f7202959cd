// The kernels for the processor that this runs on.
#pragma once

#include "attention.h"
#include "codec.h"
#include "elementwise.h"
#include "fixed.h"
#include "grouped.h"
#include "paged.h"
#include "quantised.h"
#include "scan.h"
#include "thin.h"
#include "tropical.h"

namespace capibara {

struct Isa {
  const AttentionKernels* attention;
  const TropicalKernels* tropical;
  const CodecKernels* codec;
  const ScanKernels* scan;
  const QuantisedKernels* quantised;
  const FixedKernels* fixed;
  const GroupedKernels* grouped;
  const ThinKernels* thin;
  const PagedKernels* paged;
  const ElementwiseKernels* elementwise;
};

const Isa& isa();

}  // namespace capibara

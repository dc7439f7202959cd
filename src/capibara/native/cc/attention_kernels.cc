// Softmax attention, forward and backward, for one instruction set.
//
// The method is FlashAttention (Dao et al. 2022, arXiv:2205.14135; the loop order of Dao 2023,
// arXiv:2307.08691): scores live in a tile of kQueryRows x kKeys that stays in cache, and are computed again in the
// backward pass. All five products of the backward pass run without a transposed copy of a tile: `product` reads its
// left operand by broadcasts, which cost the same at any stride. Exponentials are taken of a register tile's sums
// before they are stored, where that is possible: without a bend, a bias or segments, forward where the lengths of
// queries and keys bound all scores.
#include "attention_backward.h"
#include "attention_forward.h"

namespace CAPIBARA_ISA {

#define CAPIBARA_TEXT_(x) #x
#define CAPIBARA_TEXT(x) CAPIBARA_TEXT_(x)
extern const capibara::AttentionKernels kAttention;
const capibara::AttentionKernels kAttention = {CAPIBARA_TEXT(CAPIBARA_ISA),
                                               forward_items,
                                               forward_scratch,
                                               forward,
                                               backward_items,
                                               backward_scratch,
                                               backward,
                                               bias_items,
                                               backward_scratch,
                                               bias};

}  // namespace CAPIBARA_ISA

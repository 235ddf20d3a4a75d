// Declares the builder function of every row of isa.def.
#pragma once

namespace fovea::emulator {

class Builder;

void build_arithmetic(Builder&);
void build_carry(Builder&);
void build_logic(Builder&);
void build_funnel(Builder&);
void build_lop3(Builder&);
void build_prmt(Builder&);
void build_bits(Builder&);
void build_bfi(Builder&);
void build_dot(Builder&);
void build_function(Builder&);
void build_testp(Builder&);
void build_setp(Builder&);
void build_set(Builder&);
void build_selp(Builder&);
void build_slct(Builder&);
void build_mov(Builder&);
void build_cvt(Builder&);
void build_cvta(Builder&);
void build_isspacep(Builder&);
void build_mapa(Builder&);
void build_getctarank(Builder&);
void build_load(Builder&);
void build_store(Builder&);
void build_atomic(Builder&);
void build_reduction(Builder&);
void build_nothing(Builder&);
void build_unsupported(Builder&);
void build_createpolicy(Builder&);
void build_stmatrix(Builder&);
void build_ldmatrix(Builder&);
void build_movmatrix(Builder&);
void build_branch(Builder&);
void build_branch_table(Builder&);
void build_call(Builder&);
void build_ret(Builder&);
void build_exit(Builder&);
void build_trap(Builder&);
void build_shuffle(Builder&);
void build_vote(Builder&);
void build_match(Builder&);
void build_redux(Builder&);
void build_activemask(Builder&);
void build_elect(Builder&);
void build_bar(Builder&);
void build_barrier(Builder&);
void build_fence(Builder&);
void build_setmaxnreg(Builder&);
void build_mbarrier(Builder&);
void build_copy(Builder&);
void build_tensormap(Builder&);
void build_launch_control(Builder&);
void build_mma_sync(Builder&);
void build_wgmma(Builder&);
void build_tcgen05(Builder&);

}  // namespace fovea::emulator

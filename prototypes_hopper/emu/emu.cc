
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
#include <barrier>
#include <random>
#include <algorithm>
using std::min;
struct D{int x;}; thread_local D threadIdx;
static std::barrier<> bar(32); static float box[32]; static int flag[32];
static float __shfl_xor_sync(unsigned,float v,int d){int l=threadIdx.x%32; box[l]=v; bar.arrive_and_wait(); float r=box[l^d]; bar.arrive_and_wait(); return r;}
static bool __any_sync(unsigned,bool p){int l=threadIdx.x%32; flag[l]=p; bar.arrive_and_wait(); bool r=false; for(int i=0;i<32;i++) r|=flag[i]; bar.arrive_and_wait(); return r;}
static float __fmaf_rn(float a,float b,float c){return fmaf(a,b,c);} static float __saturatef(float x){return x>0?(x<1?x:1):0;}
static float __fdividef(float a,float b){return a/b;} 
static int __float_as_int(float x){int y;memcpy(&y,&x,4);return y;} static float __int_as_float(int x){float y;memcpy(&y,&x,4);return y;}
static unsigned bf(float x){unsigned u;memcpy(&u,&x,4); u+=0x7fff+((u>>16)&1); return u>>16;}
static float fb(unsigned h){unsigned u=(h&0xffff)<<16; float x; memcpy(&x,&u,4); return x;}

#ifndef TILEOPS_ATTENTION_ROWS
#define TILEOPS_ATTENTION_ROWS
namespace attn {

// -inf for every column above the row's last visible one; last is the last visible column,
// counted from this thread's first column, of the upper of the thread's two rows.
template <int N> inline void mask_after(float *s, int last) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    int column = 8 * (r / 4) + r % 2 - ((r / 2) % 2) * 8;
    s[r] = column > last ? -INFINITY : s[r];
  }
}

// The same last column for both rows.
template <int N> inline void mask_length(float *s, int last) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    s[r] = 8 * (r / 4) + r % 2 > last ? -INFINITY : s[r];
  }
}

// Row maxima of the tile and of what m holds, over the four threads that share a row.
template <int N> inline void row_max(const float *s, const float *m, float *top) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = fmaxf(s[2 * h], s[2 * h + 1]);
    float b = fmaxf(s[2 * h + 4], s[2 * h + 5]);
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
      a = fmaxf(a, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      b = fmaxf(b, fmaxf(s[4 * j + 2 * h + 4], s[4 * j + 2 * h + 5]));
    }
    a = fmaxf(a, b);
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
    top[h] = fmaxf(a, m[h]);
  }
}

inline float exp2_fast(float x){ return exp2f(x);} 

// Moves the reference maxima m to top where any row of the warp grew by more than slack
// (log2 units), and says whether it did. alpha is what the rows' sums must be multiplied by.
inline bool move_reference(float *m, const float *top, float *l, float *alpha, float scale,
                              float slack) {
  bool grew = (top[0] - m[0]) * scale > slack || (top[1] - m[1]) * scale > slack;
  bool any = __any_sync(0xffffffffu, grew);
  if (any) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float safe = top[h] == -INFINITY ? 0.f : top[h];
      alpha[h] = exp2_fast((m[h] - safe) * scale);
      l[h] *= alpha[h];
      m[h] = top[h];
    }
  }
  return any;
}

// 2**(x + 120) / 2**120 of y = (x + 120) / 128 on the FMA pipe; y saturates, so that x is held
// between -120 and 8. The nearest integer goes into the exponent, a cubic gives the rest.
inline float exp2_poly(float y) {
  const float magic = 12582912.f;  // 1.5 * 2**23: a sum with it has its integer in the low bits
  float whole = __fmaf_rn(y, 128.f, magic - 120.f);
  float part = __fmaf_rn(y, 128.f, -120.f - (whole - magic));
  float p = __fmaf_rn(part, 0.05517166f, 0.24261114f);
  p = __fmaf_rn(p, part, 0.69326099f);
  p = __fmaf_rn(p, part, 0.99992807f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(whole) << 23));
}

// Scores become weights 2**((s - m) * scale) in place; l takes this thread's part of the sums.
// Of every EVERY numbers the last one is computed on the FMA pipe (0: none).
template <int N, int EVERY> inline void weights(float *s, const float *m, float *l,
                                                   float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float shift = m[h] == -INFINITY ? 0.f : m[h] * scale;
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int r = 4 * j + 2 * h + e;
        if (EVERY > 0 && (2 * j + e) % (EVERY > 0 ? EVERY : 1) == EVERY - 1) {
          s[r] = exp2_poly(__saturatef(__fmaf_rn(s[r], scale / 128.f, (120.f - shift) / 128.f)));
        } else {
          s[r] = exp2_fast(__fmaf_rn(s[r], scale, -shift));
        }
      }
      a += s[4 * j + 2 * h];
      b += s[4 * j + 2 * h + 1];
    }
    l[h] += a + b;
  }
}

// Orders what follows behind the exponentials: a shared store that depends on their sums and
// never happens, so that the assembler cannot move the wait for the values product above them.
inline void after_weights(const float*){} 

template <int N> inline void scale_rows(float *o, const float *alpha) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    o[r] *= alpha[(r / 2) % 2];
  }
}

// Sums over the four threads of a row, the inverse of each and the natural log-sum-exp. The
// reference is a score of the row, so that a sum is at least 1; without keys it is at most what
// exp2_poly makes of -inf, and the row gives 0 and -inf.
inline void close_rows(const float *m, const float *l, float *inverse, float *lse,
                          float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = l[h] + __shfl_xor_sync(0xffffffffu, l[h], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    inverse[h] = sum <= 0.5f ? 0.f : __fdividef(1.f, sum);
    lse[h] = sum <= 0.5f ? -INFINITY : m[h] * scale * 0.693147180559945f + logf(sum);
  }
}

// The next tile of the launch, the same for the whole warp. The last taker of a launch (every
// CTA takes one tile too many) sets the counter back to zero.


// N numbers rounded to pairs of 16-bit numbers, the left operand of the next product.
template <int N, bool B> void pack(const float*x, unsigned*y){ for(int r=0;r<N/2;++r) y[r]=bf(x[2*r])|(bf(x[2*r+1])<<16);} 

// The packed 64 x D tile of a warpgroup into shared memory, panels of 64 columns, 128-byte
// swizzle; tile is the warpgroup's first row in the first panel, PANEL the bytes of a panel.


}  // namespace attn
#endif

template<int BN,int D,int EVERY> void run(bool causal,int SQ,int SK,int m0,float gain,float slack,double&worst,double&worstl){
  std::mt19937 g(SQ*31+SK+m0); std::normal_distribution<float> nd;
  std::vector<float> q(16*D),k((SK+BN)*D,0.f),v((SK+BN)*D,0.f);
  for(auto&x:q)x=nd(g)*gain; for(int i=0;i<SK*D;i++){k[i]=nd(g); v[i]=nd(g);}
  float scale=1.f/sqrtf(D)*1.4426950408889634f;
  std::vector<float> O(16*D),L(16);
  int last=causal?std::min(SK,m0+64+SK-SQ):SK; int nb=std::max(1,(last+BN-1)/BN); if(last<0)nb=1;
  auto lane=[&](int t){ threadIdx.x=t; int gr=t/4,c=t%4; float s[BN/2],acc[D/2]; unsigned p[BN/4]; float m[2]={-INFINITY,-INFINITY},l[2]={0,0},top[2],alpha[2],inv[2],ls[2];
    for(int r=0;r<D/2;r++)acc[r]=0; bool fresh=true;
    static unsigned P[32][BN/4];
    for(int n=0;n<nb;n++){
      for(int r=0;r<BN/2;r++){int row=gr+8*((r/2)%2),col=8*(r/4)+2*c+r%2; float d=0; for(int e=0;e<D;e++)d+=q[row*D+e]*k[(n*BN+col)*D+e]; s[r]=d;}
      int fl=m0+SK-SQ;
      if(causal){ if((n+1)*BN-1>fl) attn::mask_after<BN/2>(s,fl+gr-n*BN-2*c);} else if((n+1)*BN>SK) attn::mask_length<BN/2>(s,SK-1-n*BN-2*c);
      attn::row_max<BN/2>(s,m,top);
      bool mv=attn::move_reference(m,top,l,alpha,scale,slack);
      attn::weights<BN/2,EVERY>(s,m,l,scale);
      if(n>0&&mv) attn::scale_rows<D/2>(acc,alpha);
      attn::pack<BN/2,true>(s,p);
      memcpy(P[t],p,sizeof p); bar.arrive_and_wait();
      // acc += P V; A operand of k16 step kk: words 4kk..4kk+3 = (row, k0..1), (row+8, k0..1), (row, k8..9), (row+8, k8..9)
      for(int r=0;r<D/2;r++){int h=(r/2)%2,col=8*(r/4)+2*c+r%2; float a=n==0?0:acc[r];
        for(int kk=0;kk<BN/16;kk++)for(int cc=0;cc<4;cc++)for(int half=0;half<2;half++){unsigned w=P[gr*4+cc][4*kk+2*half+h]; int key=n*BN+16*kk+8*half+2*cc; a+=fb(w)*v[key*D+col]+fb(w>>16)*v[(key+1)*D+col];}
        acc[r]=a;}
      bar.arrive_and_wait();
    }
    attn::close_rows(m,l,inv,ls,scale); attn::scale_rows<D/2>(acc,inv);
    for(int r=0;r<D/2;r++) O[(gr+8*((r/2)%2))*D+8*(r/4)+2*c+r%2]=acc[r];
    if(c==0){L[gr]=ls[0];L[gr+8]=ls[1];}
  };
  std::vector<std::thread> ts; for(int t=0;t<32;t++)ts.emplace_back(lane,t); for(auto&t:ts)t.join();
  double num=0,den=1e-30; for(int r=0;r<16;r++){ std::vector<double> z; double mx=-INFINITY; int lim=causal?m0+r+SK-SQ:SK-1; lim=std::min(lim,SK-1);
    for(int j=0;j<=lim;j++){double d=0; for(int e=0;e<D;e++)d+=(double)q[r*D+e]*k[j*D+e]; d/=sqrt(D); z.push_back(d); mx=std::max(mx,d);} double sum=0; for(auto&x:z)sum+=exp(x-mx);
    for(int e=0;e<D;e++){double o=0; for(int j=0;j<=lim;j++)o+=exp(z[j]-mx)*v[j*D+e]; if(z.size())o/=sum; num+=(o-O[r*D+e])*(o-O[r*D+e]); den+=o*o; if(z.empty()&&O[r*D+e]!=0){printf("BAD empty\n");}}
    if(z.size()) worstl=std::max(worstl,fabs(mx+log(sum)-L[r])); else if(L[r]!=-INFINITY)printf("BAD lse %f\n",L[r]);}
  double e=sqrt(num/den); if(!(e<worst))worst=e;
}
int main(){
  double w,l;
#define GO(BN,D,EV) w=l=0; for(float gain:{1.f,6.f}) for(float slack:{0.f,8.f}){ run<BN,D,EV>(true,512,512,448,gain,slack,w,l); run<BN,D,EV>(true,512,512,0,gain,slack,w,l); run<BN,D,EV>(true,300,177,64,gain,slack,w,l); run<BN,D,EV>(true,300,177,128,gain,slack,w,l); run<BN,D,EV>(true,100,333,64,gain,slack,w,l); run<BN,D,EV>(false,100,333,0,gain,slack,w,l); run<BN,D,EV>(false,16,1,0,gain,slack,w,l);} printf("BN %d D %d poly %d: rel %.2e lse %.1e\n",BN,D,EV,w,l);
  GO(128,128,0) GO(128,64,0) GO(96,64,0) GO(64,64,0) GO(128,64,8) GO(128,64,4)
}

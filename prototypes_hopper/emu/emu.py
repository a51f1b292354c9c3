"""The device functions on a host: one warp of 32 threads, one tile of rows, several key blocks."""
import re, subprocess, sys
sys.path.insert(0,"/tmp/hopper/proto")
from softmax_cuda import SOURCE
src=SOURCE.replace("__logf","logf")
def cut(name, new):
    global src
    m=re.search(r"[^\n]*\b"+name+r"\(", src); i=m.start()
    # include template line start
    j=src.index("{",m.end()); d=0
    for k in range(j,len(src)):
        d+= (src[k]=="{")-(src[k]=="}")
        if d==0: break
    src=src[:i]+new+src[k+1:]
cut("exp2_fast","inline float exp2_fast(float x){ return exp2f(x);} ")
cut("after_weights","inline void after_weights(const float*){} ")
cut("next_tile","")
cut("pack","template <int N, bool B> void pack(const float*x, unsigned*y){ for(int r=0;r<N/2;++r) y[r]=bf(x[2*r])|(bf(x[2*r+1])<<16);} ")
cut("put_tile","")
src=src.replace("__device__ __forceinline__","inline")
host=r"""
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
"""+src+r"""
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
"""
open("emu.cc","w").write(host)
r=subprocess.run(["g++","-std=c++20","-O2","-pthread","-w","emu.cc","-o","emu"],capture_output=True,text=True)
print(r.stderr[:3000])
